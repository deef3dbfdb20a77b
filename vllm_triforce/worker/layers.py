"""The attention layers of the models that vLLM loaded, and what serves them on the platform."""

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform


def attention_layers(vllm_config) -> dict[str, Attention]:
    """All attention layers loaded so far, by name, in the order of their construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)


def attention_backend():
    """The platform's module of ``attention/``: its retrieval attention and its draft attention."""
    if current_platform.is_cpu():
        from vllm_triforce.attention import cpu

        return cpu.CPURetrievalAttention, cpu.CPUDraftAttention
    if current_platform.is_cuda_alike():
        from vllm_triforce.attention import gpu

        return gpu.GPURetrievalAttention, gpu.GPUDraftAttention
    raise ValueError(
        f"TriForce has no sparse attention for platform {current_platform.device_name!r} yet; "
        "use vLLM on CUDA, ROCm or a CPU, or another speculative method"
    )
