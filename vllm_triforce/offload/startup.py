"""Plans and reports the KV cache in host memory at start-up."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.offload.cache import OffloadedCache
from vllm_triforce.offload.placement import Placement, all_would_fit, place_layers

logger = init_logger("vllm.triforce")
_GIB = 1 << 30


def check_chosen_backend(vllm_config) -> None:
    """Check the attention backend that vLLM will choose, before weights load.

    ``config/checks.py`` checks a backend that the user chose.

    Raises:
        ValueError: the backend does not read staged layers.
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
    specs: Mapping, config: ResolvedConfig, vllm_config, device_bytes: int, summary_share: float
) -> OffloadedCache:
    """Place the target's layers in device and host memory.

    Args:
        specs: vLLM's KV cache specs of the target's layers, by name.
        device_bytes: device memory for KV, the staging layer, the pool and chunk summaries.
        summary_share: bytes of chunk summaries for each byte of KV.

    Raises:
        ValueError: layers differ in kind, or less fits than the longest request needs.
    """
    kinds = set(specs.values())
    if len(kinds) != 1 or not isinstance(spec := next(iter(kinds)), FullAttentionSpec):
        raise ValueError(
            f"kv_offload_gib={config.kv_offload_gib:g} is not supported with {len(kinds)} kinds of "
            "KV cache in the target: all layers share one staging layer with full attention. "
            "Drop it."
        )
    num_seqs = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
    page_bytes = spec.page_size_bytes
    place = partial(
        place_layers,
        num_layers=len(specs),
        page_bytes=page_bytes,
        device_bytes=device_bytes,
        pool_bytes=num_seqs * config.table_width * page_bytes * config.uses_level2,
        summary_share=summary_share,
        max_blocks=_max_blocks(spec.block_size, config, vllm_config),
    )
    assert config.kv_offload_gib is not None
    placement = place(host_bytes=int(config.kv_offload_gib * _GIB))
    _check_room(placement, place, num_seqs, spec.block_size, config, vllm_config, device_bytes)
    if all_would_fit(placement, device_bytes, summary_share):
        logger.warning_once(
            "kv_offload_gib=%g: the device has room for about as much KV cache (%.2f GiB), where "
            "it is read faster. Drop it, or raise it for longer contexts.",
            config.kv_offload_gib,
            placement.kv_bytes / _GIB,
        )
    return OffloadedCache(placement)


def _max_blocks(block_size: int, config: ResolvedConfig, vllm_config) -> int:
    """Return the number of blocks that the engine can use; unbounded with prefix caching."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.enable_prefix_caching:
        return 1 << 62
    reach = config.num_speculative_tokens + config.gamma
    blocks_per_request = -(-(vllm_config.model_config.max_model_len + reach) // block_size)
    return scheduler.max_num_seqs * blocks_per_request + 1  # vLLM keeps a null block


def _check_room(
    placement: Placement,
    place: Callable[..., Placement],
    num_seqs: int,
    block_size: int,
    config: ResolvedConfig,
    vllm_config,
    device_bytes: int,
) -> None:
    """Check that the planned blocks suffice.

    Args:
        place: gives the placement for other ``host_bytes``.
        num_seqs: requests that the pool has room for.

    Raises:
        ValueError: fewer blocks fit than ``num_gpu_blocks_override``, or than the longest request
            needs. The message names a setting that would do.
    """
    setting, model = f"kv_offload_gib={config.kv_offload_gib:g}", vllm_config.model_config
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        if placement.num_blocks < override:
            raise ValueError(
                f"{setting} with num_gpu_blocks_override={override}: {placement.num_blocks} blocks "
                "fit. Raise the former or lower the latter."
            )
        return
    min_blocks = -(-model.max_model_len // block_size) + 1  # vLLM keeps a null block
    # With original_max_model_len = -1, vLLM lowers max_model_len until it fits.
    if placement.num_blocks >= min_blocks or model.original_max_model_len == -1:
        return
    num_tokens = (placement.num_blocks - 1) * block_size
    min_host_bytes = placement.num_layers * placement.page_bytes * min_blocks
    if place(host_bytes=min_host_bytes).num_blocks >= min_blocks:
        remedy = f"kv_offload_gib={min_host_bytes / _GIB + 0.05:.1f} would do"
    else:
        remedy = (
            f"--max-model-len {num_tokens} would do; a lower max_speculating_seqs or "
            "retrieval_budget leaves room for more"
        )
    pool = placement.num_host_layers * placement.pool_bytes
    raise ValueError(
        f"{setting}: KV of {num_tokens} tokens fits, fewer than max_model_len="
        f"{model.max_model_len}; the device has {device_bytes / _GIB:.2f} GiB for a staging layer, "
        f"chunk summaries and level 2's pool, which takes {pool / _GIB:.2f} GiB for {num_seqs} "
        f"requests; {remedy}"
    )


def report_offload(offload: OffloadedCache, kv_cache_config, length: int) -> None:
    """Log where layers lie and the least time that a full pass takes.

    Args:
        kv_cache_config: vLLM's, with the number of blocks of the rank that has the fewest.
        length: tokens of the longest request.
    """
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    placement = replace(offload.placement, num_blocks=kv_cache_config.num_blocks)
    bytes_per_token = placement.num_host_layers * placement.page_bytes / block_size
    bytes_per_s = offload.bandwidth()
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
        bytes_per_token / 1024,
        length,
        bytes_per_token * length / bytes_per_s,
        bytes_per_s / 1e9,
    )
