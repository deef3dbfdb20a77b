from vllm_triforce.lab.policies.base import LabPolicy, Sizes
from vllm_triforce.lab.policies.h2o import H2O
from vllm_triforce.lab.policies.retrieval import Retrieval
from vllm_triforce.lab.policies.streaming import Streaming
from vllm_triforce.lab.policies.topk import TopK

POLICIES: dict[str, type[LabPolicy]] = {
    policy.name: policy for policy in (TopK, Retrieval, H2O, Streaming)
}

__all__ = ["H2O", "POLICIES", "LabPolicy", "Retrieval", "Sizes", "Streaming", "TopK"]
