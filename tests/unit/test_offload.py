"""KV in host memory: where layers lie, what is refused, and what is said at start."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config import checks as module
from vllm_triforce.config.checks import check_offload
from vllm_triforce.offload.placement import all_would_fit, place_layers
from vllm_triforce.offload.startup import plan_offload

GIB = 1 << 30
# Llama-3.1-8B in blocks of 16 tokens: 8 heads of 128 numbers of two bytes, keys and values.
PAGE = 16 * 2 * 8 * 128 * 2
SHARE = 1 / 32


def placed(host_gib: float, device_gib: float):
    """Place the layers of an 8B model, with 320 blocks for each host layer's pool."""
    return place_layers(
        num_layers=32,
        page_bytes=PAGE,
        host_bytes=int(host_gib * GIB),
        device_bytes=int(device_gib * GIB),
        pool_bytes=320 * PAGE,
        summary_share=SHARE,
        max_blocks=1 << 62,
    )


def device_bytes(placement) -> float:
    """Add up the bytes on the device, part by part."""
    layers = placement.num_device_layers * placement.num_blocks * PAGE
    staging = placement.num_blocks * PAGE
    summaries = SHARE * placement.num_layers * placement.num_blocks * PAGE
    return layers + staging + summaries + placement.num_host_layers * 320 * PAGE


@pytest.mark.parametrize("host", [0.31, 1, 16, 30.5])
@pytest.mark.parametrize("device", [2.1, 4, 10])
def test_no_placement_has_more_blocks_or_device_layers(host, device):
    found = placed(host, device)
    assert found.host_bytes <= host * GIB and device_bytes(found) <= device * GIB
    assert found.num_host_layers + found.num_device_layers == 32
    assert found.kv_bytes == 32 * found.num_blocks * PAGE
    for number in range(32):
        blocks = found.num_blocks + (number <= found.num_device_layers)
        other = type(found)(32, number, blocks, PAGE)
        assert other.host_bytes > host * GIB or device_bytes(other) > device * GIB, other


def test_too_little_memory_is_refused():
    with pytest.raises(ValueError, match=r"kv_offload_gib=8: .* takes 0\.62 GiB; lower max_spec"):
        placed(8, 0.01)
    with pytest.raises(ValueError, match="kv_offload_gib"):
        placed(1e-6, 10)


def test_it_is_seen_where_offloading_only_costs():
    assert all_would_fit(placed(0.5, 40), 40 * GIB, SHARE)
    assert all_would_fit(placed(4, 40), 40 * GIB, SHARE), "a twentieth more"
    assert not all_would_fit(placed(8, 40), 40 * GIB, SHARE)
    assert not all_would_fit(placed(30, 10), 10 * GIB, SHARE)


@pytest.mark.parametrize("size", [0, -1.5, float("inf"), float("nan"), True, "64"])
def test_a_size_is_a_number_above_zero(size):
    with pytest.raises(ValueError, match="kv_offload_gib="):
        TriForceConfig(kv_offload_gib=size)


def test_fewer_requests_are_speculated_on_at_a_time_unless_asked_for():
    def max_seqs(**keys) -> int:
        return TriForceConfig(**keys).resolve(16).max_speculating_seqs

    assert (max_seqs(), max_seqs(kv_offload_gib=8)) == (64, 4)
    assert max_seqs(kv_offload_gib=8, max_speculating_seqs=9) == 9


def test_proposals_are_longer_where_a_full_pass_is_dear():
    def longest(max_num_seqs=None, **keys) -> int | None:
        asked = TriForceConfig(**keys)
        return asked.with_defaults(True, None, True, max_num_seqs).num_speculative_tokens

    assert (longest(), longest(kv_offload_gib=8)) == (12, 16)
    assert longest(kv_offload_gib=8, num_speculative_tokens=9) == 9
    # Each takes room for the distributions of all requests.
    found = {n: (longest(n), longest(n, kv_offload_gib=8)) for n in (1, 16, 17, 256)}
    assert found == {1: (12, 32), 16: (12, 32), 17: (12, 16), 256: (12, 16)}
    assert longest(4, kv_offload_gib=8, num_speculative_tokens=9) == 9


def test_plain_decoding_is_refused_where_vllm_does_it_by_itself():
    with pytest.raises(ValueError, match=r"levels='3' is plain decoding.*Set kv_offload_gib, or"):
        TriForceConfig(levels="3").with_defaults(can_adapt=True)


def test_plain_decoding_speculates_on_nobody():
    filled = TriForceConfig(levels="3", kv_offload_gib=8).with_defaults(can_adapt=True)
    resolved = filled.resolve(16)
    assert resolved.is_plain and resolved.min_context > 1 << 30
    assert not resolved.adaptive_keys and not resolved.sources
    assert resolved == filled.resolve(16) and resolved.num_speculative_tokens == 1


def engine(**changes) -> SimpleNamespace:
    """Make vLLM's configuration; ``a__b=1`` sets the attribute ``b`` of ``a``."""
    made = SimpleNamespace(
        use_v2_model_runner=True,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_offloading_size=None, block_size=16),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(fuse_rope_kvcache=False, fuse_qk_norm_rope_kvcache=False)
        ),
        model_config=SimpleNamespace(model="target", hf_text_config=SimpleNamespace()),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, nnodes=1, data_parallel_size_local=1
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        setattr(functools.reduce(getattr, path, made), last, value)
    return made


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"use_v2_model_runner": False}, "Model Runner V1"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="Some")}, "KV connector 'Some'"),
        ({"cache_config__kv_offloading_size": 7.0}, "kv_offloading_size=7"),
        ({"cache_config__block_size": 544}, "--block-size 544"),
        ({"attention_config__backend": SimpleNamespace(name="FLASHINFER")}, "FLASHINFER"),
        (
            {"compilation_config__pass_config__fuse_rope_kvcache": True},
            "pass_config.fuse_rope_kvcache=true",
        ),
        (
            {"model_config__hf_text_config": SimpleNamespace(layer_types=["sliding_attention"])},
            "kinds sliding_attention",
        ),
        (
            {"model_config__hf_text_config": SimpleNamespace(num_kv_shared_layers=8)},
            "8 layers of target 'target' read another layer's",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes, said):
    config = TriForceConfig(kv_offload_gib=0.5).resolve(16)
    check_offload(engine(), config)
    with pytest.raises(ValueError, match=f"kv_offload_gib=0.5.*{said}"):
        check_offload(engine(**changes), config)


def test_blocks_of_any_size_are_staged_where_level_2_takes_no_part():
    keys = TriForceConfig(kv_offload_gib=0.5, levels="3").with_defaults(can_adapt=True)
    check_offload(engine(cache_config__block_size=544), keys.resolve(544))


def test_more_than_the_machine_has_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"kv_offload_gib=1e\+06: the machine has \d+\.\d GiB"):
        check_offload(engine(), TriForceConfig(kv_offload_gib=1e6).resolve(16))
    memory = SimpleNamespace(total=64 * GIB)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(module, "get_cgroup_memory_limit", lambda: None)
    config = TriForceConfig(kv_offload_gib=20).resolve(16)
    check_offload(engine(parallel_config__tensor_parallel_size=2), config)
    check_offload(engine(parallel_config__data_parallel_size_local=0), config)
    four = engine(parallel_config__tensor_parallel_size=4)
    with pytest.raises(ValueError, match=r"each of 4 ranks here.* has 64\.0 GiB.* 14\.4 at most"):
        check_offload(four, config)
    # Of a container, what it may take.
    monkeypatch.setattr(module, "get_cgroup_memory_limit", lambda: 16 * GIB)
    with pytest.raises(ValueError, match=r"has 16\.0 GiB of memory, or allows as much"):
        check_offload(engine(), config)


def a_plan(host_gib: float, device_gib: float, *, length=131_072, auto=False, **keys):
    """Plan the offload of an 8B model."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert spec.page_size_bytes == PAGE
    override = keys.pop("num_gpu_blocks_override", None)
    caching = keys.pop("enable_prefix_caching", True)
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=override, enable_prefix_caching=caching
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=keys.pop("max_num_seqs", 16)),
        model_config=SimpleNamespace(
            max_model_len=length, original_max_model_len=-1 if auto else length
        ),
    )
    if "levels" not in keys:
        keys["num_speculative_tokens"] = 16
    config = TriForceConfig(kv_offload_gib=host_gib, **keys).resolve(16)
    specs = dict.fromkeys(map(str, range(32)), spec)
    return plan_offload(specs, config, vllm_config, int(device_gib * GIB), SHARE).placement


def test_too_little_for_the_longest_request_is_refused_with_a_value():
    """The suggested value works."""
    assert a_plan(16, 5).num_blocks * 16 > 131_072
    with pytest.raises(ValueError, match=r"kv_offload_gib=8: .*; kv_offload_gib=16\.\d would do"):
        a_plan(8, 5)
    a_plan(16.2, 5)
    with pytest.raises(ValueError, match=r"for 4 requests; --max-.* a lower max_speculating_seqs"):
        a_plan(17, 2.9)
    a_plan(17, 2.9, max_speculating_seqs=3)
    with pytest.raises(ValueError, match=r"; --max-model-len (\d+) would do") as refused:
        a_plan(16, 1.4, max_speculating_seqs=1)
    length = int(re.search(r"--max-model-len (\d+)", str(refused.value))[1])
    for how in ({"length": length}, {"auto": True}):  # with auto, vLLM takes what fits
        # One block more, which is nobody's: vLLM counts without it.
        assert a_plan(16, 1.4, max_speculating_seqs=1, **how).num_blocks * 16 == length + 16


@pytest.mark.parametrize("levels", ["3", "1,3"])
def test_without_level_2_there_is_no_pool(levels):
    plain = a_plan(17, 2.9, levels=levels)
    assert plain.pool_bytes == 0
    assert plain.num_device_layers >= a_plan(17, 2.9, max_speculating_seqs=1).num_device_layers


def test_host_memory_is_filled_for_the_prefix_cache_alone():
    assert a_plan(90, 8, max_num_seqs=1).num_device_layers == 0
    found = a_plan(90, 8, max_num_seqs=1, enable_prefix_caching=False)
    assert found.num_blocks == 8192 + 2 + 1 and found.num_device_layers > 8


def test_a_number_of_blocks_that_is_asked_for_is_given_or_refused():
    assert a_plan(64, 8, num_gpu_blocks_override=700).num_blocks == 700
    with pytest.raises(ValueError, match=r"num_gpu_blocks_override=9000000: \d+ blocks fit"):
        a_plan(64, 8, num_gpu_blocks_override=9_000_000)
