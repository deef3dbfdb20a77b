"""Models of levels 1 and 2: loading, and layers and KV cache apart from the target's.

Level 1's draft is a model of its own, or a head, which reads the target's hidden states beside the
tokens. EAGLE-3 heads read those before some layers, which they fuse; MTP layers read those that the
target returns. Level 2's model is the target or a copy of it, over the target's own KV cache
(``level2_model``).
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.cache.streaming import StreamingCache
from vllm_triforce.config import ResolvedConfig, check_draft
from vllm_triforce.config.level2 import level2_load_config, level2_model_config
from vllm_triforce.core.model_pass import PassInput, run_model, target_inputs
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")


def with_own_layers(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of a config that has no layers yet, for a model of level 1 or 2.

    vLLM takes every layer of its own config (``static_forward_context``) for one of the target's:
    KV connectors load them all, and the KV cache has a place for each. A pass and its metadata
    builder look layers up by name, in the config that they are given.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config


def private_cache(layers: dict, vllm_config, config: ResolvedConfig, num_slots: int, device):
    """Allocate a KV cache of ``num_slots`` windows for the draft's layers and bind it to them.

    Returns:
        The cache's block tables and vLLM's metadata builder for the layers.

    Raises:
        ValueError: the layers differ in their KV cache spec.
    """
    specs = {layer.get_kv_cache_spec(vllm_config) for layer in layers.values()}
    if len(specs) != 1:
        raise ValueError(
            f"the draft's layers have {len(specs)} kinds of KV cache, TriForce needs one; "
            "use a draft whose layers are alike"
        )
    spec = specs.pop()
    cache = StreamingCache(config.window_tokens, spec.block_size, num_slots, device)
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    num_bytes = len(layers) * spec.page_size_bytes * cache.num_blocks
    with checked_allocation(
        f"level 1's cache of {num_slots} windows of {config.window_tokens} tokens",
        num_bytes,
        device,
        "lower max_speculating_seqs, num_recent_tokens or num_sink_tokens",
    ):
        caches = allocate_layers(list(layers), spec, cache.num_blocks, layout, device)
    for layer_name, layer in layers.items():
        swaps.LAYER_CACHE.set(layer, caches[layer_name])
    first = next(iter(layers.values()))
    group = AttentionGroup(first.get_attn_backend(), list(layers), spec, kv_cache_group_id=0)
    group.create_metadata_builders(vllm_config, device, spec.block_size)
    return cache, group.get_metadata_builder()


def allocate_layers(
    layer_names: list[str], spec, num_blocks: int, layout, device
) -> dict[str, torch.Tensor]:
    """Allocate KV tensors of ``num_blocks`` blocks per layer in vLLM's layout, by layer name."""
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * num_blocks * len(layer_names),
        layers=layer_names,
        layer_stride=page * num_blocks,
        block_stride=page,
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=layer_names, kv_cache_spec=spec)],
    )
    return allocate_kv_cache(kv_cache_config, device, layout, [spec.block_size])


@contextmanager
def loading_draft(draft_model: str) -> Iterator[None]:
    """Name the draft model in errors of vLLM's loader.

    Raises:
        RuntimeError: loading failed.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"draft model {draft_model!r} could not be loaded ({type(error).__name__}: {error}); "
            "check its files, or leave 'model' out of speculative_config for prompt lookup"
        ) from error


def warm_up(model: nn.Module, vllm_config, device: torch.device, is_copy: bool = False) -> None:
    """Run the draft, or the target's copy, once, to compile it before the first request."""
    more = {}
    inputs = PassInput.from_rows([[0, 0]], [0], device)
    if is_copy:
        more = target_inputs(model, vllm_config, inputs.token_ids, inputs.positions)
    if is_head(model):
        draft_config = vllm_config.speculative_config.draft_model_config
        shape, dtype = (2, draft_config.get_hidden_size()), vllm_config.model_config.dtype
        more["hidden_states"] = torch.zeros(shape, dtype=dtype, device=device)
    run_model(model, vllm_config, inputs, None, {}, **more)


def is_head(model: torch.nn.Module) -> bool:
    """True if a loaded draft reads the target's hidden states."""
    return "hidden_states" in inspect.signature(model.forward).parameters


def aux_layers(vllm_config) -> list[int]:
    """Return the target's layers before which the head reads states; none for an MTP layer."""
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    return [] if check_draft.is_mtp(hf_config) else hf_config.eagle_aux_hidden_state_layer_ids


def num_states(vllm_config) -> int:
    """Return the number of states that the head reads of a token."""
    return len(aux_layers(vllm_config)) or 1


def states_read(
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    aux: Sequence[torch.Tensor] | None,
) -> Sequence[torch.Tensor]:
    """Return the states of a pass of the target, or of the head, that a head reads next."""
    return aux or [hidden]  # no others with an MTP layer


def fusion_of(head: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the projection of a token's states, one after the other, to the head's input."""
    return getattr(head, "combine_hidden_states", lambda states: states)


def emit_states(target: Any, copy: Any, vllm_config) -> None:
    """Make the target, and level 2's copy if it is another, return the states that a head reads."""
    if layers := aux_layers(vllm_config):
        for model in {id(target): target, id(copy): copy}.values():
            model.set_aux_hidden_state_layers(tuple(layers))


class Level2Model(NamedTuple):
    """Model of level 2's passes, and the config under which it runs."""

    model: Any
    vllm_config: Any
    is_copy: bool


class SharedAttention(nn.Module):
    """Attention of a copy, by the target's layer: its KV cache, scales, window and sinks."""

    def __init__(self, layer: Attention, dtype: torch.dtype) -> None:  # both the target's
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
    """Load the copy that ``level2_model`` names, or return the target where there is no name.

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
    if config.model_config.dtype != vllm_config.model_config.dtype:
        _separate_modules(model, target)
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


def _separate_modules(model: nn.Module, target: nn.Module) -> None:
    """Copy the modules that a copy shares with the target.

    Models of one process share rotary embeddings of one dtype, which a model may name (gpt-oss:
    float32). A pass in another dtype rounds their table for good (``_match_cos_sin_cache_dtype`` in
    vllm/model_executor/layers/rotary_embedding/base.py).
    """
    of_target, copies = set(target.modules()), dict[int, Any]()
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in of_target:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, copy.deepcopy(module, copies))


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
