"""The target's layers by the KV cache group that vLLM put them in, and which of them retrieve."""

from dataclasses import dataclass

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

NO_SPARSE_LAYER = (
    "no layer of the target has full attention that TriForce can make sparse (sliding windows and "
    "ALiBi stay dense); use another speculative method"
)


@dataclass
class KVGroup:
    """One of vLLM's KV cache groups: layers that share a block table."""

    block_size: int
    sparse_layer_names: list[str]
    dense_layer_names: list[str]
    """Layers that retrieval does not fit (sliding windows): at level 2 as at level 3."""
    dense_builder: object | None = None


def attention_layers(vllm_config) -> dict[str, Attention]:
    """All attention layers loaded so far, by name, in the order of their construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)


def check_kernel_blocks(block_sizes: list[int], kernel_block_sizes: list[int]) -> None:
    """Refuses KV blocks that a backend's kernels see in pieces: our tables name whole blocks.

    Args:
        block_sizes: tokens of a block of each KV cache group.
        kernel_block_sizes: the same, as the attention kernels have them.
    """
    for size, of_kernel in zip(block_sizes, kernel_block_sizes):
        if size != of_kernel:
            raise ValueError(
                f"block_size={size}: the attention backend's kernels read such a KV block as "
                f"blocks of {of_kernel} tokens, which level 2's tables do not name; use "
                f"--block-size {of_kernel}, or another --attention-backend"
            )


def _check_block_size(block_sizes: list[int], config) -> None:
    """Refuses KV blocks of another size than our lengths are multiples of: the attention backend
    may choose one when the model is loaded, which is after ours were."""
    if config.block_size not in block_sizes:
        raise ValueError(
            f"vLLM made KV blocks of {block_sizes[0]} tokens once the model was loaded, where its "
            f"configuration had said {config.block_size}; use --block-size {block_sizes[0]}"
        )


def group_layers(kv_cache_config, attn_groups, block_sizes, target_layers, backend, config):
    """Sorts the target's layers: which retrieve, which stay dense, with which builder."""
    groups, sparse_layers, sparse_builder, sparse_gid = [], [], None, None
    for gid, spec in enumerate(kv_cache_config.kv_cache_groups):
        group = KVGroup(block_sizes[gid], [], [])
        for name in spec.layer_names:
            layer = target_layers.get(name)
            if layer is None:
                raise ValueError(f"layer {name!r} is not an attention layer that TriForce knows")
            fits = backend.can_retrieve(layer) and block_sizes[gid] == config.block_size
            if fits and sparse_gid in (None, gid):
                sparse_gid = gid
                group.sparse_layer_names.append(name)
            else:
                group.dense_layer_names.append(name)
        for attn_group in attn_groups[gid]:
            if set(attn_group.layer_names) & set(group.sparse_layer_names):
                sparse_builder = attn_group.get_metadata_builder()
            if set(attn_group.layer_names) & set(group.dense_layer_names):
                group.dense_builder = attn_group.get_metadata_builder()
        order = list(target_layers)
        group.sparse_layer_names.sort(key=order.index)
        sparse_layers += [target_layers[name] for name in group.sparse_layer_names]
        groups.append(group)
    if not sparse_layers:
        _check_block_size(block_sizes, config)
        raise ValueError(NO_SPARSE_LAYER)
    return groups, sparse_layers, sparse_builder
