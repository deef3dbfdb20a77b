from vllm_triforce.selection.policy import SelectionPolicy
from vllm_triforce.selection.retrieval import RetrievalPolicy
from vllm_triforce.selection.streaming import StreamingPolicy

POLICIES: dict[str, type[SelectionPolicy]] = {
    "retrieval": RetrievalPolicy,
    "streaming": StreamingPolicy,
}

__all__ = ["POLICIES", "RetrievalPolicy", "SelectionPolicy", "StreamingPolicy"]
