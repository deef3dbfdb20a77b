"""Draft model: loading, first run and a KV cache separate from vLLM's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.cache.streaming import StreamingCache
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.head import is_head
from vllm_triforce.core.model_pass import PassInput, run_model, target_inputs
from vllm_triforce.vllm_patches import swaps


def private_cache(layers: dict, vllm_config, config: ResolvedConfig, num_slots: int, device):
    """Allocate a KV cache for the draft's layers and bind it to them.

    Args:
        layers: attention layers of the draft, by name.
        num_slots: number of requests with a window.

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


def warm_up(
    model: torch.nn.Module, vllm_config, device: torch.device, is_copy: bool = False
) -> None:
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
