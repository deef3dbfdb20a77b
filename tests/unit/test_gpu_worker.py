"""Promises of the GPU worker that need no GPU: memory is left for what TriForce keeps, and plain
decoding finds the graphs that it has without TriForce."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils import jit_monitor

from benchmarks import memory_table
from tests.unit.fake_graphs import full_graph_by_size, full_graphs, manager_of, without_gpu
from vllm_triforce.config import TriForceConfig, checks
from vllm_triforce.config.budget import chunk_size, fit_blocks
from vllm_triforce.config.check_draft import check_draft_kind
from vllm_triforce.core.kv_groups import check_kernel_blocks, group_layers, retrieval_block_size
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.runner_v2.decode_graphs import (
    add_plain_decode_graphs,
    serve_any_mix,
    thin_decode_graphs,
)
from vllm_triforce.runner_v2.passes import PassGraphs
from vllm_triforce.vllm_patches import carrier
from vllm_triforce.worker.gpu import TriForceGPUWorker
from vllm_triforce.worker.memory import buffer_bytes, kv_cache_budget, summary_bytes_per_kv_byte


def room(
    available: int, draft_layers: int = 2, eager: bool = False, length: int = 131_072, **keys
) -> int:
    layer = SimpleNamespace(num_heads=32, num_kv_heads=8, head_size=128)
    vllm_config = SimpleNamespace(
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=128),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            head_dtype=torch.bfloat16,
            max_model_len=length,
            get_vocab_size=lambda: 32_000,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.NONE if eager else CUDAGraphMode.FULL_DECODE_ONLY
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    config = TriForceConfig(**keys).resolve(16)
    drafts = {i: SimpleNamespace(num_kv_heads=12, head_size=64) for i in range(draft_layers)}
    layers = {i: layer for i in range(32)}
    fixed = sum(buffer_bytes(layers, drafts, config, vllm_config).values())
    share = summary_bytes_per_kv_byte(layers, config, vllm_config)
    return kv_cache_budget(available, fixed, share, config)


GIB = 2**30


def test_memory_is_left_for_buffers_and_summaries():
    """A mean has a byte a number, for 16 keys and 16 values of two bytes."""
    left = room(100 * GIB)
    share = (128 + 4) / (32 * 128 * 2)
    assert 99 * GIB < left * (1 + share) < 100 * GIB
    assert room(100 * GIB, selection="streaming") > left
    assert room(100 * GIB, max_speculating_seqs=8) > left
    assert room(100 * GIB, gamma=1) > room(100 * GIB, gamma=6)
    # Windows of 24 blocks for 64 requests; keys and values of 12 heads of 64 numbers.
    windows = 64 * 24 * 16 * 2 * 12 * 64 * 2
    one, three = (
        room(100 * GIB, num_sink_tokens=16, num_recent_tokens=240, draft_layers=layers)
        for layers in (1, 3)
    )
    assert one - three == pytest.approx(2 * windows / (1 + share), rel=1e-6)
    # Graphs of 16 rows keep four copies of 48 tokens' logits in float32, 6.144 MB each.
    in_graphs = room(100 * GIB, eager=True) - left
    assert in_graphs == pytest.approx(4 * 6_144_000 / (1 + share), rel=1e-6)
    # Without kernels a row's summaries are gathered, of 131,072 tokens 1 / 8 GiB, and 8,192 chunks
    # have three numbers for each of 32 heads.
    short, long = (room(100 * GIB, selection="quest", length=n) for n in (131_072, 1 << 20))
    row = GIB / 8 + 4 * 8192 * 3 * 32
    assert short - long == pytest.approx(7 * row / (1 + 2 * share), rel=1e-6)
    with pytest.raises(ValueError, match="max_speculating_seqs=64"):
        room(GIB // 100)


@pytest.fixture
def manager():
    """Return vLLM's manager for 16 requests that verify up to seven tokens each."""
    return manager_of(16, 6)


def dispatched(manager, *tokens: int, has_prefill: bool = False):
    """Return the descriptor of a step in which requests have so many tokens."""
    uniform = tokens[0] if len(set(tokens)) == 1 else None
    longest = None if has_prefill else max(tokens)
    return manager.dispatch(len(tokens), sum(tokens), uniform, 0, max_query_len=longest)


def test_every_mix_of_lengths_has_a_graph(manager):
    """Steps that stock vLLM decodes in one graph have one with TriForce."""
    serve_any_mix(manager)
    assert manager.varlen_decode
    add_plain_decode_graphs(manager)
    for tokens in ((7,), (7, 7), (7, 1), (1, 4, 7, 1), (3, 3), (7, 1, 1, 1, 1, 1), (1,) * 9 + (7,)):
        desc = dispatched(manager, *tokens)
        assert desc in full_graphs(manager), tokens
        assert desc.num_reqs >= len(tokens) and desc.num_tokens >= sum(tokens)
    for size in (1, 3, 16):
        assert dispatched(manager, *(1,) * size).uniform_token_count == 1
    sizes = [desc.num_tokens for desc in full_graphs(manager)]
    assert sizes == sorted(sizes, reverse=True)
    assert dispatched(manager, 7, 1, has_prefill=True).cg_mode == CUDAGraphMode.PIECEWISE
    assert dispatched(manager, 8, 1).cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(("query_len", "above"), [(3, 0), (7, 16)])
def test_inner_passes_have_graphs_for_every_number_of_rows(query_len, above, monkeypatch):
    """A batch takes the smallest graph that holds it, unless its rounds are graphs."""
    without_gpu(monkeypatch)
    sizes, captured = [32, 64, 100] if above else [1, 4, 16, 32, 64, 100], []
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    made = PassGraphs(SimpleNamespace(), torch.device("cpu"), mode, query_len, sizes, above)
    made.capture_pass(captured.append, "a pass")
    assert captured == sizes[::-1]
    for rows in range(1, 103):
        desc = made.dispatch(rows, rows * query_len, query_len, 0)
        holding = [size for size in sizes if size >= rows > above]
        expected = (CUDAGraphMode.FULL, holding[0]) if holding else (CUDAGraphMode.NONE, rows)
        assert (desc.cg_mode, desc.num_reqs) == expected


def test_blocks_that_kernels_see_in_pieces_are_refused():
    check_kernel_blocks([16, 32], [16, 32])
    with pytest.raises(ValueError, match=r"block_size=128.*--block-size 64"):
        check_kernel_blocks([16, 128], [16, 64])


def _attn_group(builder: str, *names: str, padded: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        layer_names=list(names),
        kv_cache_spec=SimpleNamespace(page_size_padded=padded),
        get_metadata_builder=lambda: builder,
    )


def _group_layers(attn_groups: list[list[SimpleNamespace]], block_sizes: list[int]):
    """Group layers, of which those with a name in capitals cannot retrieve."""
    names = [[n for kind in kinds for n in kind.layer_names] for kinds in attn_groups]
    groups = [SimpleNamespace(layer_names=of_group) for of_group in names]
    backend = SimpleNamespace(can_retrieve=str.islower)
    in_order = sorted((name for of_group in names for name in of_group), key=str.lower)
    recurrent = {name: name for name in in_order if "net" in name}
    layers = {name: name for name in in_order if name not in recurrent}
    config = SimpleNamespace(kv_cache_groups=groups)
    return group_layers(config, attn_groups, block_sizes, layers, backend, recurrent)


def test_layers_that_differ_within_a_group_have_their_own_builders():
    """Those that retrieve are the most that are alike, in the order of the pass."""
    kinds = [_attn_group("x", "a"), _attn_group("y", "d", "B", "c"), _attn_group("z", "E")]
    (group,), sparse, builder = _group_layers([kinds], [32])
    assert (sparse, builder) == (["c", "d"], "y")
    assert group.sparse_layer_names == sparse
    assert group.dense == [(["a"], "x"), (["B"], "y"), (["E"], "z")]
    assert group.dense_layer_names == ["a", "B", "E"]


def test_one_group_retrieves_whatever_the_size_of_its_blocks():
    kinds = [[_attn_group("x", "A")], [_attn_group("y", "b")], [_attn_group("y", "c")]]
    groups, sparse, _ = _group_layers(kinds, [32, 64, 64])
    assert sparse == ["b"] and retrieval_block_size(groups) == 64
    assert [group.dense_layer_names for group in groups] == [["A"], [], ["c"]]


def test_recurrent_layers_have_groups_of_their_own():
    kinds = [
        [_attn_group("x", "net 1", "net 2")],
        [_attn_group("y", "b")],
        [_attn_group("x", "net 3")],
    ]
    groups, sparse, _ = _group_layers(kinds, [544, 544, 544])
    assert sparse == ["b"] and not any(group.dense for group in groups)
    names = [group.recurrent_layer_names for group in groups]
    assert names == [["net 1", "net 2"], [], ["net 3"]]


@pytest.mark.parametrize("block, chunk", [(16, 16), (128, 128), (544, 32), (784, 16)])
def test_a_large_block_is_several_chunks(block, chunk):
    assert chunk_size(block) == chunk


def test_blocks_with_padding_do_not_retrieve():
    with pytest.raises(ValueError, match="no layer of the target has full attention"):
        _group_layers([[_attn_group("x", "a", padded=4096)]], [32])


def test_budgets_fit_the_blocks_that_vllm_makes():
    config = TriForceConfig(retrieval_budget=128).with_defaults(can_adapt=False).resolve(32)
    assert fit_blocks(config, 32) == config
    fitted = fit_blocks(config, 64)
    assert (fitted.retrieval_recent_tokens, fitted.retrieval_budget) == (64, 192)
    assert fitted.budget.max_blocks - fitted.budget.recent == 2, "the first and one retrieved"


@pytest.mark.parametrize(
    "of_model, of_text",
    [
        ({"uses_alibi": True}, {}),
        ({"architectures": ["Step1ForCausalLM"]}, {}),
        ({}, {"model_type": "gpt_oss"}),
        ({}, {"model_type": "granite", "layer_types": ["sliding_attention"]}),
    ],
)
def test_drafts_with_alibi_or_sinks_are_refused_on_a_gpu(of_model, of_text):
    plain = dict.fromkeys(("use_mla", "is_hybrid", "is_attention_free", "uses_alibi"), False)
    text = SimpleNamespace(**{"model_type": "llama", **of_text})
    made = {**plain, "model": "a draft", "architectures": [], "hf_text_config": text, **of_model}
    check_draft_kind(SimpleNamespace(**made), is_cpu=True)
    with pytest.raises(ValueError, match=r"'a draft' has ALiBi or attention sinks"):
        check_draft_kind(SimpleNamespace(**made), is_cpu=False)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cache_dtype": "fp8"}, r"kv_cache_dtype='fp8'.*8\.9.*kv_cache_dtype='auto'"),
        ({"use_v2": False}, "use_v2_model_runner=False is not supported on a GPU"),
        ({"sleeps": True}, "enable_sleep_mode=True is not supported with TriForce"),
        ({"seqs": 64, "tokens": 319}, r"max_num_batched_tokens=319.* 320 tokens"),
        ({"seqs": 16, "tokens": 79}, r"max_num_batched_tokens=79.* 80 tokens"),
        ({"seqs": 16, "tokens": 80}, None),
        # Compiled code reads M-RoPE positions by the strides of vLLM's buffer, and Gemma 3n and 4
        # keep each layer's embeddings in one.
        ({"mrope": True, "seqs": 16, "tokens": 79}, r"tokens=79 .* takes images or has M-RoPE,"),
        ({"images": True, "seqs": 16, "tokens": 79}, r"tokens=79 .* takes images or has M-RoPE,"),
        ({"images": True, "seqs": 16, "tokens": 80}, None),
    ],
)
def test_unsupported_settings_on_a_gpu_are_refused(changed, named, monkeypatch):
    monkeypatch.setattr(checks, "is_cpu", lambda: False)
    monkeypatch.setattr(checks, "_reads_fp8", lambda: False)  # as on an A100
    model_config = SimpleNamespace(
        model="a model",
        uses_mrope="mrope" in changed,
        supports_multimodal_inputs="images" in changed,
        enable_sleep_mode=changed.get("sleeps", False),
    )
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, is_moe_model=False),
        cache_config=SimpleNamespace(
            cache_dtype=changed.get("cache_dtype", "auto"),
            kv_cache_dtype_skip_layers=[],
            sliding_window=None,
        ),
        use_v2_model_runner=changed.get("use_v2", True),
        lora_config=SimpleNamespace() if list(changed) == ["seqs", "tokens"] else None,
        scheduler_config=SimpleNamespace(
            max_num_seqs=changed.get("seqs"), max_num_batched_tokens=changed.get("tokens")
        ),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        model_config=model_config,
    )
    config = TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True).resolve(16)
    with nullcontext() if named is None else pytest.raises(ValueError, match=named):
        checks.check_vllm_config(vllm_config, config)


@pytest.mark.parametrize("has_jit_warmup", [True, False])
def test_proposals_are_warmed_up_before_vllm_watches_for_compilers(has_jit_warmup, monkeypatch):
    """With ``jit_monitor_mode="error"`` a kernel that compiles later ends the engine."""
    calls = []
    monkeypatch.setattr(jit_monitor, "activate", lambda **_: calls.append("watched"))
    worker = object.__new__(TriForceGPUWorker)
    counters = LevelCounters()

    def warm_up() -> None:
        calls.append("warm")
        counters.num_proposals = 2  # what is counted by then is not sent

    worker.triforce = SimpleNamespace(
        warm_up=warm_up, sent_counters=counters, end_step=lambda output: output
    )
    worker.model_runner = SimpleNamespace(sample_tokens=lambda _: SimpleNamespace(req_ids=["a"]))
    worker.vllm_config = SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=has_jit_warmup)
    )
    worker.observability_config = SimpleNamespace(
        jit_monitor_mode="error", jit_monitor_verbose=False
    )
    worker._maybe_activate_jit_monitor()
    assert calls == ["warm", "watched"][: 1 + has_jit_warmup]
    counters.num_proposals += 3
    assert carrier.INCREMENTS.of(worker.sample_tokens(None)) == {"num_proposals": 3}


def test_graphs_are_at_most_a_third_more_than_stock_vllms():
    """Count those of an 8B model without a draft; each of stock's for single tokens is there."""
    config = TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True).resolve(16)
    for seqs, max_query_len in ((256, None), (1024, config.num_speculative_tokens + 1)):
        counts = memory_table.graphs(seqs, config, has_draft=False)
        assert sum(counts.values()) <= 1.34 * memory_table.num_stock_graphs(seqs)
        stock, ours = manager_of(seqs, 0), manager_of(seqs, config.num_speculative_tokens)
        assert dispatched(ours, 1, 1, 1).cg_mode == CUDAGraphMode.PIECEWISE, "the mended fault"
        add_plain_decode_graphs(ours, max_query_len)
        for desc in full_graphs(stock):
            assert dispatched(ours, *(1,) * desc.num_reqs).num_tokens == desc.num_tokens


def test_memory_is_at_most_three_hundredths_of_the_kv_cache():
    assert float(memory_table.column(1024, False)["**of the KV cache**"].strip("*%")) <= 3.0


@pytest.mark.parametrize("any_mix", [True, False])
def test_fewer_graphs_serve_the_same_batches(any_mix):
    manager = manager_of(256, 12)
    if any_mix:
        serve_any_mix(manager)
    full, before = full_graphs(manager), full_graph_by_size(manager)
    thin_decode_graphs(manager)
    kept, after = full_graphs(manager), full_graph_by_size(manager)
    assert set(kept) < set(full) and len(kept) <= 10
    for num_tokens, old in before.items():
        new = after[num_tokens]
        assert (new is None) == (old is None)
        if new is not None:
            assert new in kept and new.num_tokens >= num_tokens and new.num_reqs >= old.num_reqs
            # Half as many more at most, where the tokens take time.
            assert num_tokens <= 128 or new.num_tokens < num_tokens + 64 + 13
