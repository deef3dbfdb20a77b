"""Layers of the target by KV cache group: sparse at level 2, dense or recurrent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

NO_SPARSE_LAYER = (
    "no layer of the target has full attention that TriForce can make sparse (sliding windows and "
    "ALiBi stay dense); use another speculative method"
)


@dataclass
class KVGroup:
    """One of vLLM's KV cache groups, whose layers share a block table."""

    block_size: int
    sparse_layer_names: list[str]
    dense: list[tuple[list[str], Any]]
    """Layers that level 2 runs as level 3 does, such as those with a sliding window: names of
    layers that are alike, and vLLM's metadata builder of them."""
    recurrent_layer_names: list[str] = field(default_factory=list)

    @cached_property
    def dense_layer_names(self) -> list[str]:
        """Names of all dense layers."""
        return [layer_name for layer_names, _ in self.dense for layer_name in layer_names]


def attention_layers(vllm_config) -> dict[str, Attention]:
    """Return all attention layers loaded so far, by name, in order of construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)


def recurrent_layers(vllm_config) -> dict[str, Any]:
    """Return all gated delta nets that level 2 can run, by name, in order of construction."""
    if not vllm_config.model_config.is_hybrid:
        return {}
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    return get_layers_from_vllm_config(vllm_config, QwenGatedDeltaNetAttention)


def own_states(layer: Any, query_len: int) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
    """Return how many states a row of level 2 has in a layer, their shape and dtype, by kind.

    A convolution's state holds the tokens of a whole pass. The full pass's holds those of its own
    drafts, which may be fewer than ``gamma``.
    """
    convolution, recurrent = layer.get_state_shape()
    num_tokens = layer.conv_kernel_size - 1 + query_len - 1
    axis = len(convolution) - 1 if is_conv_state_dim_first() else 0
    convolution = (*convolution[:axis], num_tokens, *convolution[axis + 1 :])
    return list(zip((1, query_len), (convolution, recurrent), layer.get_state_dtype()))


def check_kernel_blocks(block_sizes: list[int], kernel_block_sizes: list[int]) -> None:
    """Reject backends whose kernels split KV blocks: level 2's tables hold whole blocks.

    Raises:
        ValueError: a kernel's block size differs from the group's.
    """
    for size, kernel_size in zip(block_sizes, kernel_block_sizes):
        if size != kernel_size:
            raise ValueError(
                f"block_size={size}: the attention backend's kernels read such a KV block as "
                f"blocks of {kernel_size} tokens, which level 2's tables do not name; use "
                f"--attention-backend TRITON_ATTN or, for a target without recurrent layers, "
                f"--block-size {kernel_size}"
            )


def group_layers(
    kv_cache_config,
    attn_groups,
    block_sizes,
    target_layers,
    backend,
    recurrent: Mapping[str, Any] | None = None,
):
    """Sort the target's layers into sparse, dense and recurrent ones.

    Sparse are the layers with full attention of the first KV cache group that has any. Where a
    group's layers differ in their heads, which is one of vLLM's attention groups for each kind, the
    largest of these is sparse: level 2 has one shape of queries and selections.

    Args:
        kv_cache_config: the runner's, which has layers that read another layer's KV cache.
        attn_groups: vLLM's attention groups per KV cache group.
        block_sizes: tokens per block of each KV cache group. They differ where keys of some layers
            are longer.
        target_layers: attention layers of the target, by name.
        backend: level 2's attention of the platform.
        recurrent: recurrent layers of the target, by name.

    Returns:
        The groups, the sparse layers and the sparse layers' metadata builder.

    Raises:
        ValueError: no layer can be sparse, or a layer is of an unknown kind.
    """
    groups: list[KVGroup] = []
    recurrent = recurrent or {}
    sparse_names: list[str] = []
    sparse_builder = None
    for gid, spec in enumerate(kv_cache_config.kv_cache_groups):
        for layer_name in spec.layer_names:
            if layer_name not in target_layers and layer_name not in recurrent:
                raise ValueError(f"layer {layer_name!r} is not a layer that TriForce knows")
        kinds = attn_groups[gid]
        fitting = [_fitting(kind, target_layers, backend) for kind in kinds]
        retrieving = max(fitting, key=len, default=[]) if not sparse_names else []
        if retrieving:
            sparse_names = retrieving
            sparse_builder = kinds[fitting.index(retrieving)].get_metadata_builder()
        group = KVGroup(block_sizes[gid], retrieving, [])
        for kind in kinds:
            names = [name for name in kind.layer_names if name not in retrieving]
            if names and names[0] in recurrent:
                group.recurrent_layer_names += names
            elif names:
                group.dense.append((names, kind.get_metadata_builder()))
        groups.append(group)
    if not sparse_names:
        raise ValueError(NO_SPARSE_LAYER)
    return groups, [target_layers[layer_name] for layer_name in sparse_names], sparse_builder


def _fitting(attn_group, target_layers: dict[str, Attention], backend) -> list[str]:
    """Return the layers of an attention group that can be sparse, in the order of the pass."""
    # Blocks with padding between them cannot be split into blocks of one head.
    if getattr(attn_group.kv_cache_spec, "page_size_padded", None) is not None:
        return []
    names = set(attn_group.layer_names)
    return [n for n, layer in target_layers.items() if n in names and backend.can_retrieve(layer)]


def retrieval_block_size(groups: list[KVGroup]) -> int:
    """Return the tokens in a KV block of the layers that retrieve."""
    return next(group.block_size for group in groups if group.sparse_layer_names)
