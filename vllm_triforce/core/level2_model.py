"""Copy of the target as level 2's model, over the target's own KV cache (``level2_model``)."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.utils.mem_utils import format_gib

from vllm_triforce.config.level2 import level2_load_config, level2_model_config
from vllm_triforce.core.own_layers import with_own_layers

logger = init_logger("vllm.triforce")


class Level2Model(NamedTuple):
    """Model of level 2's passes, and the config under which it runs."""

    model: Any
    vllm_config: Any
    is_copy: bool


class SharedAttention(nn.Module):
    """Attention of a copy, by the target's layer: its KV cache, scales, window and sinks.

    Args:
        layer: the target's ``Attention``.
        dtype: of the target.
    """

    def __init__(self, layer: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self._dtype = dtype

    def forward(
        self,
        query: torch.Tensor,  # as of vLLM's Attention
        key: torch.Tensor | None,  # None, as value, where the KV cache is another layer's
        value: torch.Tensor | None,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        dtype = self._dtype
        if key is not None and value is not None:
            key, value = key.to(dtype), value.to(dtype)
        return self.layer(query.to(dtype), key, value, *args, **kwargs).to(query.dtype)

    def __getattr__(self, name: str):
        """Return an attribute of the target's layer, as some models read them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def load_level2_model(
    name: str | None, target: nn.Module, target_layers: dict[str, Attention], vllm_config
) -> Level2Model:
    """Load the copy that ``name`` names, or return the target where there is no name.

    Args:
        name: value of ``level2_model``.
        target: as loaded by vLLM.
        target_layers: the target's attention layers, by name.

    Raises:
        RuntimeError: loading failed, or the copy's layers are not the target's.
    """
    if name is None:
        return Level2Model(target, vllm_config, is_copy=False)
    try:
        config = copy_config(name, vllm_config)
        with set_model_tag("level2_model"):
            model = get_model(vllm_config=config)
    except Exception as error:
        raise RuntimeError(
            f"level2_model={name!r} could not be loaded ({type(error).__name__}: {error}); use "
            "another dtype, scheme or checkpoint, or leave level2_model out of speculative_config"
        ) from error
    shared = _share_attention(model, target_layers, vllm_config.model_config.dtype)
    if missing := sorted(target_layers.keys() ^ shared):
        raise RuntimeError(
            f"level2_model={name!r}: the attention layers {missing[:3]} are not in both models; "
            "use a checkpoint of the target itself"
        )
    # A pass looks attention layers up by name; these names must find the target's layers.
    config.compilation_config.static_forward_context.update(target_layers)
    target_parts = {id(part) for layer in target_layers.values() for part in layer.parameters()}
    num_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in target_parts)
    logger.info("Level 2's model is %s, of %s GiB.", name, format_gib(num_bytes))
    return Level2Model(model, config, is_copy=True)


def copy_config(name: str, vllm_config) -> VllmConfig:
    """Return a config under which the copy's layers register apart from the target's."""
    config = with_own_layers(vllm_config)
    config.model_config = level2_model_config(name, vllm_config.model_config)
    config.load_config = level2_load_config(config.model_config, vllm_config)
    config.quant_config = VllmConfig.get_quantization_config(
        config.model_config, config.load_config
    )
    # As VllmConfig does, for the formats whose checkpoints it reads.
    if config.load_config.load_format in ("auto", "hf", "safetensors"):
        config.model_config.maybe_untie_word_embeddings()
    # A checkpoint with KV scales sets ``cache_dtype``; the target's stays.
    config.cache_config = copy.copy(vllm_config.cache_config)
    # Fused quantization would write scales into the target's attention layers.
    config.compilation_config.pass_config = copy.copy(config.compilation_config.pass_config)
    config.compilation_config.pass_config.fuse_attn_quant = False
    config.lora_config = None
    return config


def _share_attention(
    model: nn.Module, target_layers: dict[str, Attention], dtype: torch.dtype
) -> set[str]:
    """Replace the attention of a copy by the target's, and return the names of the layers."""
    names = set()
    for path, module in list(model.named_modules()):
        if isinstance(module, Attention):
            names.add(module.layer_name)
            if module.layer_name in target_layers:
                parent, _, child = path.rpartition(".")
                shared = SharedAttention(target_layers[module.layer_name], dtype)
                setattr(model.get_submodule(parent), child, shared)
    return names
