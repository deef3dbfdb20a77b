"""Puts the last layers' KV cache into host memory, at start."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.offload.cache import OffloadedCache
from vllm_triforce.offload.placement import Placement, all_would_fit, place_layers
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")
_GIB = 1 << 30


def check_chosen_backend(vllm_config) -> None:
    """Before weights load; ``config/check_offload.py`` has seen what was asked for.

    Raises:
        ValueError: vLLM would choose a backend that does not read staged layers.
    """
    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, vllm_config.cache_config.cache_dtype
        )
    if backend.get_name() == "FLASHINFER":
        raise ValueError(
            "kv_offload_gib is not supported with FLASHINFER, which vLLM chooses here: its plans "
            "are made for another KV cache. Use --attention-backend FLASH_ATTN or TRITON_ATTN."
        )


def plan_offload(
    specs: Mapping,
    config: ResolvedConfig,
    vllm_config,
    device_bytes: int,
    summary_share: float,
) -> OffloadedCache:
    """Decides where layers lie.

    Args:
        specs: of the target's layers by name, as vLLM has them.
        device_bytes: left for KV, the staging layer, the pool and chunk summaries.
        summary_share: bytes of chunk summaries for each byte of KV.

    Raises:
        ValueError: the layers are not of one kind, or less fits than one request may need.
    """
    kinds = set(specs.values())
    if len(kinds) != 1 or not isinstance(spec := next(iter(kinds)), FullAttentionSpec):
        raise ValueError(
            f"kv_offload_gib={config.kv_offload_gib:g} is not supported with {len(kinds)} kinds of "
            "KV cache in the target: all layers share one staging layer with full attention. "
            "Drop it."
        )
    page, most = spec.page_size_bytes, _most_blocks(spec.block_size, config, vllm_config)

    def place(num_seqs: int, host_bytes: int) -> Placement:
        return place_layers(
            num_layers=len(specs),
            page_bytes=page,
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            pool_bytes=0 if config.is_plain else num_seqs * config.table_width * page,
            summary_share=summary_share,
            max_blocks=most,
        )

    num_seqs = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
    assert config.kv_offload_gib is not None
    placement = place(num_seqs, int(config.kv_offload_gib * _GIB))
    _check_room(placement, place, num_seqs, spec.block_size, config, vllm_config, device_bytes)
    if all_would_fit(placement, device_bytes, summary_share):
        logger.warning_once(
            "kv_offload_gib=%g: the device has room for about as much KV cache (%.2f GiB), where "
            "it is read faster. Drop it, or raise it for longer contexts.",
            config.kv_offload_gib,
            placement.kv_bytes / _GIB,
        )
    return OffloadedCache(placement)


def _most_blocks(block_size: int, config: ResolvedConfig, vllm_config) -> int:
    """That there is a use for: with prefix caching, for any number."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.enable_prefix_caching:
        return 1 << 62
    reach = config.num_speculative_tokens + config.gamma
    of_request = -(-(vllm_config.model_config.max_model_len + reach) // block_size)
    return scheduler.max_num_seqs * of_request + 1  # one block is nobody's


def _check_room(
    placement: Placement,
    place: Callable[[int, int], Placement],
    num_seqs: int,
    block_size: int,
    config: ResolvedConfig,
    vllm_config,
    device_bytes: int,
) -> None:
    """
    Args:
        place: from the pool's requests, and bytes of host memory.

    Raises:
        ValueError: fewer blocks fit than were asked for, or than the longest request needs.
    """
    asked, model = f"kv_offload_gib={config.kv_offload_gib:g}", vllm_config.model_config
    assert config.kv_offload_gib is not None
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        if placement.num_blocks < override:
            raise ValueError(
                f"{asked} with num_gpu_blocks_override={override}: {placement.num_blocks} blocks "
                "fit. Raise the former or lower the latter."
            )
        return
    needed = -(-model.max_model_len // block_size) + 1  # one block is nobody's
    if placement.num_blocks >= needed or model.original_max_model_len == -1:
        return  # with -1, vLLM takes the longest that fits
    enough = placement.num_layers * placement.page_bytes * needed

    def fits(num_seqs: int) -> bool:
        try:
            return place(num_seqs, enough).num_blocks >= needed
        except ValueError:
            return False

    remedies = []
    most_seqs = next((n for n in range(num_seqs, 0, -1) if fits(n)), None)
    if most_seqs is None:
        remedies = [f"--max-model-len {(placement.num_blocks - 1) * block_size}"]
    else:
        if most_seqs < num_seqs:
            remedies.append(f"max_speculating_seqs={most_seqs}")
        if place(most_seqs, int(config.kv_offload_gib * _GIB)).num_blocks < needed:
            remedies.append(f"kv_offload_gib={enough / _GIB + 0.05:.1f}")
    pool = placement.num_host_layers * placement.pool_bytes
    raise ValueError(
        f"{asked}: KV of {(placement.num_blocks - 1) * block_size} tokens fits, fewer than "
        f"max_model_len={model.max_model_len}; the device has {device_bytes / _GIB:.2f} GiB for "
        f"a staging layer, chunk summaries and level 2's pool, which takes "
        f"{pool / _GIB:.2f} GiB for {num_seqs} requests; {' and '.join(remedies)} would do"
    )


def report_offload(offload: OffloadedCache, kv_cache_config, length: int) -> dict:
    """Says what lies where, and what a full pass costs at least.

    Args:
        kv_cache_config: vLLM's, with as many blocks as the rank with the fewest has.
        length: tokens of the longest request.

    Returns:
        The same, in bytes and bytes a second, of this rank.
    """
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    placement = replace(offload.placement, num_blocks=kv_cache_config.num_blocks)
    of_token = placement.num_host_layers * placement.page_bytes / block_size
    rate = offload.bandwidth()
    logger.info_once(
        "TriForce keeps KV of %d tokens: the first %d of %d layers' on the device (%.2f GiB), the "
        "others' in host memory (%.2f GiB). Beside it the device has a staging layer of %.2f GiB "
        "and level 2's pool of %.2f GiB. A full pass reads %.0f KiB from host memory for each "
        "token of context: over %d tokens it takes at least %.3g s at the %.1f GB/s measured here, "
        "and without speculation it is for one token.",
        placement.num_blocks * block_size,
        placement.num_device_layers,
        placement.num_layers,
        placement.num_device_layers * placement.layer_bytes / _GIB,
        placement.host_bytes / _GIB,
        placement.layer_bytes / _GIB,
        placement.num_host_layers * placement.pool_bytes / _GIB,
        of_token / 1024,
        length,
        of_token * length / rate,
        rate / 1e9,
    )
    return {
        "num_tokens": placement.num_blocks * block_size,
        "num_device_layers": placement.num_device_layers,
        "num_host_layers": placement.num_host_layers,
        "device_bytes": placement.num_device_layers * placement.layer_bytes,
        "host_bytes": placement.host_bytes,
        "staging_bytes": placement.layer_bytes,
        "pool_bytes": placement.num_host_layers * placement.pool_bytes,
        "bytes_per_token": of_token,
        "bytes_per_second": rate,
    }


@contextmanager
def offloaded_allocation(offload: OffloadedCache) -> Iterator[None]:
    """While vLLM allocates its KV cache."""
    import vllm.v1.worker.gpu.attn_utils as attn_utils

    original = swaps.ALLOCATE_KV_CACHE.set(attn_utils, offload.allocate)
    try:
        yield
    finally:
        swaps.ALLOCATE_KV_CACHE.set(attn_utils, original)
