"""What can be compared: all policies that serve, and those of the lab alone."""

from vllm_triforce import selection
from vllm_triforce_bench.acceptance.policies.base import LabPolicy, Sizes
from vllm_triforce_bench.acceptance.policies.chunked import chunked
from vllm_triforce_bench.acceptance.policies.h2o import H2O
from vllm_triforce_bench.acceptance.policies.topk import TopK

_SERVING = [chunked(policy) for policy in selection.POLICIES.values()]
POLICIES: dict[str, type[LabPolicy]] = {policy.name: policy for policy in (TopK, *_SERVING, H2O)}

__all__ = ["H2O", "POLICIES", "LabPolicy", "Sizes", "TopK"]
