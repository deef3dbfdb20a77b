"""The attention layers of the models that vLLM loaded."""

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention


def attention_layers(vllm_config) -> dict[str, Attention]:
    """All attention layers loaded so far, by name, in the order of their construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)
