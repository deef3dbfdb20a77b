"""Puts the last layers' KV cache into host memory, at start."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.offload.cache import OffloadedCache
from vllm_triforce.offload.placement import Placement, all_would_fit, place_layers
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")
_GIB = 1 << 30


def plan_offload(
    specs: Mapping,
    config: ResolvedConfig,
    num_seqs: int,
    device_bytes: int,
    summary_share: float,
) -> OffloadedCache:
    """Decides where layers lie, and says so.

    Args:
        specs: of the target's layers by name, as vLLM has them.
        num_seqs: that can be speculated on at a time.
        device_bytes: left for KV, the staging layer, the pool and chunk summaries.
        summary_share: bytes of chunk summaries for each byte of KV.

    Raises:
        ValueError: the layers are not of one kind, or nothing fits.
    """
    kinds = set(specs.values())
    if len(kinds) != 1 or not isinstance(spec := next(iter(kinds)), FullAttentionSpec):
        raise ValueError(
            f"kv_offload_gib={config.kv_offload_gib:g}: the target's layers have {len(kinds)} "
            "kinds of KV cache, and one layer with full attention is staged for all; drop "
            "kv_offload_gib"
        )
    assert config.kv_offload_gib is not None
    pool_bytes = num_seqs * config.table_width * spec.page_size_bytes
    placement = place_layers(
        len(specs),
        spec.page_size_bytes,
        int(config.kv_offload_gib * _GIB),
        device_bytes,
        pool_bytes,
        summary_share,
    )
    _report(placement, pool_bytes, spec.block_size)
    if all_would_fit(placement, device_bytes, summary_share):
        logger.warning_once(
            "kv_offload_gib=%g: the device has room for as much KV cache (%.2f GiB), where it is "
            "read faster; drop it, or raise it for longer contexts",
            config.kv_offload_gib,
            placement.kv_bytes / _GIB,
        )
    return OffloadedCache(placement)


def _report(placement: Placement, pool_bytes: int, block_size: int) -> None:
    logger.info_once(
        "TriForce keeps KV of %d tokens: the first %d of %d layers' on the device (%.2f GiB), the "
        "others' in host memory (%.2f GiB). Beside it the device has a staging layer of %.2f GiB "
        "and level 2's pool of %.2f GiB. A full pass reads %.0f KiB from host memory for each "
        "token of context.",
        placement.num_blocks * block_size,
        placement.num_device_layers,
        placement.num_layers,
        placement.num_device_layers * placement.layer_bytes / _GIB,
        placement.host_bytes / _GIB,
        placement.layer_bytes / _GIB,
        placement.num_host_layers * pool_bytes / _GIB,
        placement.num_host_layers * placement.page_bytes / block_size / 1024,
    )


@contextmanager
def allocating_with(offload: OffloadedCache | None) -> Iterator[None]:
    """While vLLM allocates its KV cache."""
    if offload is None:
        yield
        return
    import vllm.v1.worker.gpu.attn_utils as attn_utils

    original = swaps.ALLOCATE_KV_CACHE.set(attn_utils, offload.allocate)
    try:
        yield
    finally:
        swaps.ALLOCATE_KV_CACHE.set(attn_utils, original)
