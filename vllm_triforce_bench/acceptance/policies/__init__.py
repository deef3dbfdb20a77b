from vllm_triforce_bench.acceptance.policies.base import LabPolicy, Sizes
from vllm_triforce_bench.acceptance.policies.h2o import H2O
from vllm_triforce_bench.acceptance.policies.retrieval import Retrieval
from vllm_triforce_bench.acceptance.policies.streaming import Streaming
from vllm_triforce_bench.acceptance.policies.topk import TopK

POLICIES: dict[str, type[LabPolicy]] = {
    policy.name: policy for policy in (TopK, Retrieval, H2O, Streaming)
}

__all__ = ["H2O", "POLICIES", "LabPolicy", "Retrieval", "Sizes", "Streaming", "TopK"]
