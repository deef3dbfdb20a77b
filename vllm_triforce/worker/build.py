"""Puts the levels together from a loaded target, a loaded draft and vLLM's KV cache."""

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from vllm_triforce.attention.query_recorder import QueryRecorder
from vllm_triforce.cache.allocation import allocating
from vllm_triforce.cache.chunk_mean_keys import ChunkMeanKeys
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.cache.streaming_cache import StreamingCache
from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import Controller
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.selection import POLICIES
from vllm_triforce.speculator.retrieval import KVGroup, RetrievalLevel
from vllm_triforce.speculator.sources import Level1Sources
from vllm_triforce.speculator.streaming import StreamingLevel
from vllm_triforce.speculator.triforce import TriForceSpeculator
from vllm_triforce.verification.noise import InnerNoise


def attention_layers(vllm_config) -> dict[str, Attention]:
    """All attention layers loaded so far, by name, in the order of their construction."""
    return get_layers_from_vllm_config(vllm_config, Attention)


class BuiltSpeculator:
    """The speculator and the parts that a runner's adapter needs.

    Args:
        target_layers, draft_layers: attention layers by name.
        attn_groups: vLLM's attention groups per KV cache group, with their metadata builders.
        block_sizes: tokens in a block of each KV cache group's block table.
    """

    def __init__(
        self,
        vllm_config,
        config: TriForceConfig,
        target,
        target_layers: dict,
        draft,
        draft_layers: dict,
        kv_cache_config,
        attn_groups,
        block_sizes: list[int],
        device,
    ) -> None:
        self.counters = LevelCounters()
        self.config = config
        backend, _ = attention_backend()
        groups, sparse_layers, sparse_builder = group_layers(
            kv_cache_config, attn_groups, block_sizes, target_layers, backend, config
        )
        self.recorder = QueryRecorder(
            len(sparse_layers), config.num_speculative_tokens + 1, config.min_context
        )
        attention = backend(sparse_layers, sparse_builder, self.recorder)
        means = _chunk_means(
            sparse_layers, vllm_config.model_config.dtype, device, attention.block_means()
        )
        chunk = config.retrieval_chunk_size
        cache = RetrievalCache(
            means,
            POLICIES[config.selection](),
            block_size=chunk,
            budget_blocks=config.retrieval_budget // chunk,
            recent_blocks=config.retrieval_recent_tokens // chunk,
            refresh_interval=config.refresh_interval,
            head_strides=attention.head_strides(),
        )
        streaming = None
        if draft is not None:
            streaming = _streaming_level(draft, draft_layers, vllm_config, config, device)
        controller = Controller(config, has_draft=streaming is not None)
        self.speculator = TriForceSpeculator(
            Level1Sources(streaming, config.prompt_lookup_max, controller),
            RetrievalLevel(target, vllm_config, groups, attention, cache, device),
            controller,
            InnerNoise(
                vllm_config.model_config.seed,
                device,
                replica=vllm_config.parallel_config.data_parallel_index,
            ),
            self.counters,
        )


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


def group_layers(kv_cache_config, attn_groups, block_sizes, target_layers, backend, config):
    """Sorts the target's layers: which retrieve, which stay dense, with which builder."""
    groups, sparse_layers, sparse_builder, sparse_gid = [], [], None, None
    for gid, spec in enumerate(kv_cache_config.kv_cache_groups):
        group = KVGroup(block_sizes[gid], [], [])
        for name in spec.layer_names:
            layer = target_layers.get(name)
            if layer is None:
                raise ValueError(f"layer {name!r} is not an attention layer that TriForce knows")
            fits = backend.can_retrieve(layer) and block_sizes[gid] == config.retrieval_chunk_size
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
        raise ValueError(
            "no layer of the target has full attention that TriForce can make sparse (sliding "
            "windows and ALiBi stay dense); use another speculative method"
        )
    return groups, sparse_layers, sparse_builder


def _chunk_means(layers: list, dtype, device, block_means) -> ChunkMeanKeys:
    first = layers[0]
    num_blocks = first.kv_cache.shape[0]
    num_keys = len(layers) * first.num_kv_heads * num_blocks
    with allocating(
        f"level 2's mean keys of {num_blocks} blocks",
        num_keys * first.head_size * dtype.itemsize,
        device,
        "make the KV cache smaller (--kv-cache-memory-bytes, --gpu-memory-utilization, or "
        "VLLM_CPU_KVCACHE_SPACE on the CPU)",
    ):
        return ChunkMeanKeys(
            num_layers=len(layers),
            num_blocks=num_blocks,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            dtype=dtype,
            device=device,
            block_means=block_means,
        )


def private_cache(layers: dict, vllm_config, config: TriForceConfig, num_slots: int, device):
    """Gives the draft's layers a cache of their own.

    Returns:
        the cache's bookkeeping, and vLLM's metadata builder for the layers.
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
    with allocating(
        f"level 1's cache of {num_slots} windows of {config.window_tokens} tokens",
        num_bytes,
        device,
        "lower --max-num-seqs, num_recent_tokens or num_sink_tokens",
    ):
        _allocate(layers, spec, cache.num_blocks, layout, device)
    first = next(iter(layers.values()))
    group = AttentionGroup(first.get_attn_backend(), list(layers), spec, kv_cache_group_id=0)
    group.create_metadata_builders(vllm_config, device, spec.block_size)
    return cache, group.get_metadata_builder()


def _streaming_level(draft, layers: dict, vllm_config, config: TriForceConfig, device):
    num_slots = vllm_config.scheduler_config.max_num_seqs
    cache, builder = private_cache(layers, vllm_config, config, num_slots, device)
    return StreamingLevel(
        draft,
        vllm_config,
        layers,
        builder,
        cache,
        config.num_sink_tokens,
        config.num_recent_tokens,
        config.window_tokens,
        device,
    )


def _allocate(layers: dict, spec, num_blocks: int, layout, device) -> None:
    """Gives layers KV tensors of their own, in the form that vLLM would give them."""
    page = spec.page_size_bytes
    names = list(layers)
    tensor = KVCacheTensor(
        size=page * num_blocks * len(names),
        layers=names,
        layer_stride=page * num_blocks,
        block_stride=page,
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
    )
    caches = allocate_kv_cache(kv_cache_config, device, layout, [spec.block_size])
    for name, layer in layers.items():
        layer.kv_cache = caches[name]
