"""Promises of the GPU worker that need no GPU: memory is left for what TriForce keeps, and plain
decoding finds the graphs that it has without TriForce."""

from types import SimpleNamespace

import pytest
import torch

from vllm_triforce.config import TriForceConfig


def room(available: int, draft_layers: int = 2, eager: bool = False, **keys) -> int:
    from vllm.config.compilation import CUDAGraphMode

    from vllm_triforce.worker.memory import (
        buffer_bytes,
        kv_cache_budget,
        summary_bytes_per_kv_byte,
    )

    layer = SimpleNamespace(num_heads=32, num_kv_heads=8, head_size=128)
    vllm_config = SimpleNamespace(
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=128),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, head_dtype=torch.bfloat16, get_vocab_size=lambda: 32_000
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


def test_memory_is_left_for_what_grows_with_the_kv_cache():
    """One mean in a byte a number for 16 keys and 16 values in two, and the buffers and the draft's
    windows of 64 requests."""
    gib = 2**30
    left = room(100 * gib)
    share = (128 + 4) / (32 * 128 * 2)
    means = left * share
    assert 99 * gib < left + means < 100 * gib
    assert room(100 * gib, selection="streaming") > left
    assert room(100 * gib, max_speculating_seqs=8) > left
    assert room(100 * gib, gamma=1) > room(100 * gib, gamma=6)
    # A window of 16 + 240 tokens grows by half of that: in 64 windows of 24 blocks, keys and values
    # of 12 heads of 64 numbers, in two bytes each.
    windows = 64 * 24 * 16 * 2 * 12 * 64 * 2
    taken = room(100 * gib, num_sink_tokens=16, num_recent_tokens=240, draft_layers=1)
    taken -= room(100 * gib, num_sink_tokens=16, num_recent_tokens=240, draft_layers=3)
    assert taken == pytest.approx(2 * windows / (1 + share), rel=1e-6)
    # Graphs of 16 rows keep four copies of 48 tokens' logits in float32, 6.144 MB each.
    in_graphs = room(100 * gib, eager=True) - left
    assert in_graphs == pytest.approx(4 * 6_144_000 / (1 + share), rel=1e-6)
    with pytest.raises(ValueError, match="max_speculating_seqs=64"):
        room(gib // 100)


@pytest.fixture
def manager():
    """vLLM's own manager on sizes 1 to 32, seven tokens a request, without a GPU's pool."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    made = object.__new__(CudaGraphManager)
    made.vllm_config = SimpleNamespace(speculative_config=None)
    made.max_num_reqs = 16
    made.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32], max_cudagraph_capture_size=32
    )
    made.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    made.decode_query_len = 7
    made.varlen_decode = False
    made.ubatch_runner = None
    made.lora_capture_cases = [0]
    made._lora_dispatch_map, made._max_lora_case = {}, 0
    made.vllm_config.cache_config = SimpleNamespace(use_kda_recoverssm=False)
    made._candidates, made._capture_descs = {}, {}
    made._init_candidates()
    made._graphs_captured = True
    return made


def test_plain_decoding_has_its_graphs(manager):
    from vllm.config.compilation import CUDAGraphMode

    from vllm_triforce.runner_v2.decode_graphs import add_plain_decode_graphs

    before = manager.dispatch(3, 3, uniform_token_count=1, num_active_loras=0)
    assert before.cg_mode == CUDAGraphMode.PIECEWISE, "the fault that is mended"
    assert add_plain_decode_graphs(manager) == 5
    for num_reqs, size in ((1, 1), (3, 4), (4, 4), (9, 16), (16, 16)):
        desc = manager.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        assert desc.cg_mode == CUDAGraphMode.FULL
        assert (desc.num_tokens, desc.num_reqs, desc.uniform_token_count) == (size, size, 1)
        assert desc in manager._capture_descs[CUDAGraphMode.FULL]
    speculating = manager.dispatch(2, 14, uniform_token_count=7, num_active_loras=0)
    assert (speculating.cg_mode, speculating.num_reqs) == (CUDAGraphMode.FULL, 2)
    mixed = manager.dispatch(2, 8, uniform_token_count=None, num_active_loras=0)
    assert mixed.cg_mode == CUDAGraphMode.PIECEWISE
    sizes = [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL]]
    assert sizes == sorted(sizes, reverse=True)
    assert add_plain_decode_graphs(manager) == 0, "once is enough"


def test_every_mix_of_lengths_has_a_graph(manager):
    """Where the attention allows it: what stock vLLM decodes in one graph, TriForce does."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_triforce.runner_v2.decode_graphs import add_plain_decode_graphs, serve_any_mix

    assert serve_any_mix(manager)
    add_plain_decode_graphs(manager)

    def dispatched(*tokens: int, has_prefill: bool = False):
        uniform = tokens[0] if len(set(tokens)) == 1 else None
        longest = None if has_prefill else max(tokens)
        return manager.dispatch(len(tokens), sum(tokens), uniform, 0, max_query_len=longest)

    for tokens in ((7,), (7, 7), (7, 1), (1, 4, 7, 1), (3, 3), (7, 1, 1, 1, 1, 1), (1,) * 9 + (7,)):
        desc = dispatched(*tokens)
        assert desc.cg_mode == CUDAGraphMode.FULL, tokens
        assert desc.num_reqs >= len(tokens) and desc.num_tokens >= sum(tokens)
        assert desc in manager._capture_descs[CUDAGraphMode.FULL]
    for size in (1, 3, 16):
        assert dispatched(*(1,) * size).uniform_token_count == 1
    assert dispatched(7, 1, has_prefill=True).cg_mode == CUDAGraphMode.PIECEWISE
    assert dispatched(8, 1).cg_mode == CUDAGraphMode.PIECEWISE
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert serve_any_mix(manager) and manager._capture_descs[CUDAGraphMode.FULL] is captured


def test_plain_graphs_record_nothing_and_are_not_taken_where_somebody_selects(manager, monkeypatch):
    """What is launched for each layer would make plain decoding slower; a selection behind a step
    that was not recorded would go by an older step's queries."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    from vllm_triforce.attention.query_recorder import StaticQueryRecorder
    from vllm_triforce.runner_v2.decode_graphs import (
        add_plain_decode_graphs,
        disable_recording_in_plain_graphs,
        serve_any_mix,
    )

    serve_any_mix(manager)
    add_plain_decode_graphs(manager)
    recorder = StaticQueryRecorder(
        1, torch.zeros(5, dtype=torch.int32), 4, 2, 8, 7, 10, torch.float32
    )
    runner = SimpleNamespace(cudagraph_manager=manager)
    disable_recording_in_plain_graphs(runner, recorder)
    heard = {}

    def capture(self, create_forward_fn):
        for descs in self._capture_descs.values():
            for desc in descs:
                create_forward_fn(desc, warmup=False)(desc)

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    quiet = runner.cudagraph_manager
    # As vLLM's own class for a model's graphs does, with what runs the model.
    super(ModelCudaGraphManager, quiet).capture(
        lambda desc, warmup: lambda desc: heard.update({desc: recorder.is_recording})
    )
    for desc, is_recording in heard.items():
        assert is_recording == (desc.uniform_token_count != 1)
    assert len(set(heard.values())) == 2

    def taken(*tokens: int):
        uniform = tokens[0] if len(set(tokens)) == 1 else None
        desc = quiet.dispatch(len(tokens), sum(tokens), uniform, 0, max_query_len=max(tokens))
        return heard[desc]

    assert taken(1, 1) and taken(1, 7) and taken(7)
    recorder.expect(selection=False)
    assert not taken(1, 1) and taken(1, 7)
    recorder.expect(selection=True)
    with recorder.without_recording():
        assert not taken(1), "as when passes are measured"


@pytest.mark.parametrize(("query_len", "above"), [(1, 0), (3, 0), (13, 16), (7, 16)])
def test_inner_passes_have_graphs_for_every_number_of_rows(query_len, above):
    """Any batch up to the largest size, in requests, finds the smallest graph that holds it,
    however many tokens each has; but not those whose rounds are graphs."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_triforce.runner_v2.passes import PassGraphs

    sizes = [32, 64, 100] if above else [1, 4, 16, 32, 64, 100]
    made = object.__new__(PassGraphs)
    made.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    made.decode_query_len, made._sizes, made._above = query_len, sizes, above
    made.lora_capture_cases = [0]
    made._lora_dispatch_map, made._max_lora_case = {}, 0
    made._candidates, made._capture_descs = {}, {}
    made._init_candidates()
    made._graphs_captured = True
    captured = made._capture_descs[CUDAGraphMode.FULL]
    assert [desc.num_reqs for desc in captured] == sizes[::-1]
    for rows in range(1, 103):
        desc = made.dispatch(rows, rows * query_len, query_len, 0)
        holding = [size for size in sizes if size >= rows > above]
        if holding:
            assert (desc.cg_mode, desc.num_reqs) == (CUDAGraphMode.FULL, holding[0])
        else:
            assert (desc.cg_mode, desc.num_reqs) == (CUDAGraphMode.NONE, rows)


def test_blocks_that_kernels_see_in_pieces_are_refused():
    from vllm_triforce.core.kv_groups import check_kernel_blocks

    check_kernel_blocks([16, 32], [16, 32])
    with pytest.raises(ValueError, match=r"block_size=128.*--block-size 64"):
        check_kernel_blocks([16, 128], [16, 64])


def test_blocks_of_a_size_that_came_too_late_are_refused_by_name():
    from vllm_triforce.core.kv_groups import group_layers

    groups = [SimpleNamespace(layer_names=["a"])]
    backend = SimpleNamespace(can_retrieve=lambda layer: True)
    with pytest.raises(ValueError, match=r"blocks of 128 tokens.*said 16; use --block-size 128"):
        group_layers(
            SimpleNamespace(kv_cache_groups=groups),
            [[]],
            [128],
            {"a": object()},
            backend,
            SimpleNamespace(block_size=16),
        )


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
    from vllm_triforce.config.check_draft import check_draft_kind

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
        ({"model_type": "gpt_oss"}, r"'a model'.*sinks in every layer.*another method"),
        ({"use_v2": False}, "use_v2_model_runner=False"),
        ({"sleeps": True}, "enable_sleep_mode=True is not supported with TriForce"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_before_weights_load(changed, named, monkeypatch):
    from vllm_triforce.config import checks

    monkeypatch.setattr(checks, "is_cpu", lambda: False)
    monkeypatch.setattr(checks, "_reads_fp8", lambda: False)  # as on an A100
    model_config = SimpleNamespace(
        model="a model",
        hf_text_config=SimpleNamespace(model_type=changed.get("model_type", "llama")),
        uses_mrope=False,
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
        lora_config=None,
        watermark_config=None,
        structured_outputs_config=SimpleNamespace(backend="auto"),
        model_config=model_config,
    )
    config = TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True).resolve(16)
    with pytest.raises(ValueError, match=named):
        checks.check_vllm_config(vllm_config, config)


@pytest.mark.parametrize("has_jit_warmup", [True, False])
def test_proposals_are_warmed_up_before_vllm_watches_for_compilers(has_jit_warmup, monkeypatch):
    """With ``jit_monitor_mode="error"`` a kernel that compiles later ends the engine."""
    from vllm.utils import jit_monitor

    from vllm_triforce.worker.gpu import TriForceGPUWorker

    calls = []
    monkeypatch.setattr(jit_monitor, "activate", lambda **_: calls.append("watched"))
    worker = object.__new__(TriForceGPUWorker)
    worker.triforce = SimpleNamespace(warm_up=lambda: calls.append("warm"))
    worker.vllm_config = SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=has_jit_warmup)
    )
    worker.observability_config = SimpleNamespace(
        jit_monitor_mode="error", jit_monitor_verbose=False
    )
    worker._maybe_activate_jit_monitor()
    assert calls == ["warm", "watched"][: 1 + has_jit_warmup]


def test_graphs_are_at_most_a_third_more_than_stock_vllms():
    """Of an 8B model at defaults, without a draft; and those for single tokens are all there."""
    from vllm.config.compilation import CUDAGraphMode

    from tools import memory_table as table
    from vllm_triforce.runner_v2.decode_graphs import add_plain_decode_graphs

    config = TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True).resolve(16)
    for seqs in (256, 1024):
        counts = table.graphs(seqs, config, has_draft=False)
        assert sum(counts.values()) <= 1.3 * table.num_stock_graphs(seqs)
        stock, _ = table.captured(seqs, 0)
        ours, _ = table.captured(seqs, config.num_speculative_tokens)
        add_plain_decode_graphs(ours)
        for desc in stock._capture_descs[CUDAGraphMode.FULL]:
            found = ours._candidates[desc.num_tokens, 0][0]
            assert (found.num_tokens, found.uniform_token_count) == (desc.num_tokens, 1)


@pytest.mark.parametrize(("levels", "expected"), [("1,2,3", ["level 2"]), ("1,3", [])])
def test_levels_that_take_no_part_have_no_graphs(levels, expected):
    """And none of theirs are reserved."""
    pytest.importorskip("triton")
    from vllm_triforce.runner_v2.graph_sizes import num_graphs
    from vllm_triforce.runner_v2.proposer import ProposerV2

    config = (
        TriForceConfig(levels=levels)
        .with_defaults(can_adapt=True, has_fixed_shapes=True)
        .resolve(16)
    )
    captured = []
    made = object.__new__(ProposerV2)
    made.sources = {}
    made.level2 = SimpleNamespace(capture=lambda mode: captured.append("level 2"))
    made._parts = SimpleNamespace(context=SimpleNamespace(config=config))
    made.capture(None)
    assert captured == expected
    assert bool(num_graphs(config, 64, 512, has_draft=False)) == bool(expected)


def test_memory_is_at_most_three_hundredths_of_the_kv_cache():
    from tools import memory_table as table

    assert float(table.column(1024, False)["**of the KV cache**"].strip("*%")) <= 3.0


@pytest.mark.parametrize("any_mix", [True, False])
def test_fewer_graphs_hold_what_all_held(any_mix):
    from vllm.config.compilation import CUDAGraphMode

    from tools import memory_table as table
    from vllm_triforce.runner_v2.decode_graphs import serve_any_mix, thin_decode_graphs

    before, _ = table.captured(256, 12)
    if any_mix:
        serve_any_mix(before)
    full = before._capture_descs[CUDAGraphMode.FULL]
    held = {key: [d for d in found if d in full] for key, found in before._candidates.items()}
    thin_decode_graphs(before)
    kept = before._capture_descs[CUDAGraphMode.FULL]
    assert set(kept) < set(full) and len(kept) <= 10
    for (num_tokens, _), old in held.items():
        found = [d for d in before._candidates[num_tokens, 0] if d.cg_mode == CUDAGraphMode.FULL]
        assert len(found) == len(old) <= 1
        if found:
            assert found[0] in kept
            assert found[0].num_tokens >= num_tokens and found[0].num_reqs >= old[0].num_reqs
            # Half as many more at most, where the tokens take time.
            assert num_tokens <= 128 or found[0].num_tokens < num_tokens + 64 + 13
