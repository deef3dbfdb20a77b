"""Layers of the target by KV cache group: sparse at level 2, or dense."""

from dataclasses import dataclass
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

NO_SPARSE_LAYER = (
    "no layer of the target has full attention that TriForce can make sparse (sliding windows and "
    "ALiBi stay dense); use another speculative method"
)


@dataclass
class KVGroup:
    """One of vLLM's KV cache groups, whose layers share a block table."""

    block_size: int
    sparse_layer_names: list[str]
    dense_layer_names: list[str]
    """Layers that level 2 runs as level 3 does, such as those with a sliding window."""
    dense_builder: Any = None
    """vLLM's metadata builder of the dense layers, if there are any."""


def attention_layers(vllm_config) -> dict[str, Attention]:
    """Return all attention layers loaded so far, by name, in order of construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)


def check_kernel_blocks(block_sizes: list[int], kernel_block_sizes: list[int]) -> None:
    """Reject backends whose kernels split KV blocks: level 2's tables hold whole blocks.

    Args:
        block_sizes: tokens per block of each KV cache group.
        kernel_block_sizes: tokens per block of the attention kernels.

    Raises:
        ValueError: a kernel's block size differs from the group's.
    """
    for size, kernel_size in zip(block_sizes, kernel_block_sizes):
        if size != kernel_size:
            raise ValueError(
                f"block_size={size}: the attention backend's kernels read such a KV block as "
                f"blocks of {kernel_size} tokens, which level 2's tables do not name; use "
                f"--block-size {kernel_size}, or another --attention-backend"
            )


def group_layers(kv_cache_config, attn_groups, block_sizes, target_layers, backend, config):
    """Sort the target's layers into sparse and dense ones.

    Sparse are the layers with full attention of the first KV cache group that has any.

    Args:
        attn_groups: vLLM's attention groups per KV cache group.
        block_sizes: tokens per block of each KV cache group.
        target_layers: attention layers of the target, by name.
        backend: level 2's attention of the platform.

    Returns:
        The groups, the sparse layers and the sparse layers' metadata builder.

    Raises:
        ValueError: no layer can be sparse, a layer is of an unknown kind, or the attention backend
            chose another block size when the model was loaded.
    """
    groups, sparse_layers, sparse_builder, sparse_gid = [], [], None, None
    for gid, spec in enumerate(kv_cache_config.kv_cache_groups):
        group = KVGroup(block_sizes[gid], [], [])
        for layer_name in spec.layer_names:
            layer = target_layers.get(layer_name)
            if layer is None:
                raise ValueError(
                    f"layer {layer_name!r} is not an attention layer that TriForce knows"
                )
            fits = backend.can_retrieve(layer) and block_sizes[gid] == config.block_size
            if fits and sparse_gid in (None, gid):
                sparse_gid = gid
                group.sparse_layer_names.append(layer_name)
            else:
                group.dense_layer_names.append(layer_name)
        for attn_group in attn_groups[gid]:
            if set(attn_group.layer_names) & set(group.sparse_layer_names):
                sparse_builder = attn_group.get_metadata_builder()
            if set(attn_group.layer_names) & set(group.dense_layer_names):
                group.dense_builder = attn_group.get_metadata_builder()
        order = list(target_layers)
        group.sparse_layer_names.sort(key=order.index)
        sparse_layers += [target_layers[layer_name] for layer_name in group.sparse_layer_names]
        groups.append(group)
    if not sparse_layers:
        if config.block_size in block_sizes:
            raise ValueError(NO_SPARSE_LAYER)
        raise ValueError(
            f"vLLM made KV blocks of {block_sizes[0]} tokens once the model was loaded, where its "
            f"configuration had said {config.block_size}; use --block-size {block_sizes[0]}"
        )
    return groups, sparse_layers, sparse_builder
