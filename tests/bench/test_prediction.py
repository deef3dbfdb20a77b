"""Promise: what is predicted follows from bytes, arithmetic and launches, and from nothing else."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import Qwen3MoeConfig
from vllm.config import ModelConfig, SpeculativeConfig

from benchmarks.gpu.models import MODELS, draft_of
from tests.models import ROOT, make_mimo
from vllm_triforce_bench.predict.cpu import measure_cpu
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import MACHINES, machine_of, named_machine
from vllm_triforce_bench.predict.steps import (
    DIRECT,
    DRAFT,
    LEVELS,
    Acceptance,
    Predictor,
    Setting,
    acceptance_for,
    inner_loop,
    pass_seconds,
    settings,
    tokens_per_step,
)


def predictor(machine="H200", model="llama-3.1-8b") -> Predictor:
    its = MODELS[model]
    return Predictor(MACHINES[machine], its, draft_of(its))


# By hand.


def test_a_large_batch_is_bound_by_arithmetic():
    """7.5 G weights but for the embedding, 2 operations each, 2,048 tokens."""
    machine = dataclasses.replace(MACHINES["H200"], kernel_seconds=0.0, graph_launch_seconds=0.0)
    seconds = pass_seconds(machine, MODELS["llama-3.1-8b"], [1] * 2048, [0] * 2048)
    assert seconds == pytest.approx(2 * 7.505e9 * 2048 / (0.6 * 989e12), rel=1e-3)


@pytest.mark.parametrize(
    "context, copy_bytes_each, plain_ms, level2_ms, step_ms",
    [
        (32_000, None, 6.5, 6.3, 25.9),
        (122_000, None, 9.2, 7.0, 31.5),
        (122_000, 1.13, 9.3, 5.7, 27.6),
    ],
)
def test_an_h200_takes_as_long_as_measured(context, copy_bytes_each, plain_ms, level2_ms, step_ms):
    """docs/results.md, "On a GPU": each pass of level 2 selected; 6 tokens in 3 rounds. An fp8 copy
    leaves the embedding and the output head."""
    like = MODELS["llama-3.1-8b"]
    its = Predictor(MACHINES["H200"], like, draft_of(like), copy_bytes_each=copy_bytes_each)
    plain_s = its.full_pass([1], [context]) + its.step_overhead(1)
    level2_s = its.level2_pass(1, 3, min(4096, context // 8), context)
    level2_s += its.selection_overhead(1, context, 1, 1)
    step_s = its.full_pass([7], [context]) + its.step_overhead(1) + its.drafts_overhead(1, 6)
    step_s += 3 * (level2_s + its.round_overhead(1, 2, True)) + 6 * its.draft_pass(1, context, 2)
    assert 1e3 * plain_s == pytest.approx(plain_ms, rel=0.05)
    assert 1e3 * level2_s == pytest.approx(level2_ms, rel=0.05)
    assert 1e3 * step_s == pytest.approx(step_ms, rel=0.05)


@pytest.mark.parametrize(
    "requests, kv_heads, head_dim, chunks, measured_us",
    [(1, 8, 128, 7600, 37.9), (1, 32, 128, 5000, 51.8), (32, 9, 64, 470, 32.0)],
)
def test_a_layers_selection_on_an_h200(requests, kv_heads, head_dim, chunks, measured_us):
    """docs/results.md, "On a GPU"; the last shape is predicted worst."""
    layer = dataclasses.replace(
        MODELS["llama-3.1-8b"], layers=1, kv_heads=kv_heads, head_dim=head_dim
    )
    seconds = Predictor(MACHINES["H200"], layer).selection_overhead(requests, chunks * 16, 1, 1)
    assert 1e6 * seconds == pytest.approx(measured_us, rel=0.15)


def test_flash_attention_2_does_not_split_the_kv_of_longer_queries():
    a100, h200 = MACHINES["A100-80GB"], MACHINES["H200"]
    assert a100.occupancy(1, 7, 32, 8) == pytest.approx(32 / 108)
    assert a100.occupancy(1, 1, 32, 8) == 1.0, "grouped heads and one token: split"
    assert a100.occupancy(1, 1, 32, 32) == pytest.approx(32 / 108), "heads not grouped: never"
    assert a100.occupancy(4, 7, 32, 8) == 1.0
    assert a100.occupancy(1, 65, 32, 8) == pytest.approx(64 / 108)
    assert h200.occupancy(1, 7, 32, 32) == 1.0
    plain, verified = (predictor("A100-80GB").full_pass([q], [122_000]) for q in (1, 7))
    kv = 122_000 * 131_072 / (0.83 * 2.039e12)
    assert verified - plain == pytest.approx(kv * (108 / 32 - 1), rel=0.01)


@pytest.mark.parametrize("k, gamma", [(6, 2), (1, 3), (8, 4)])
@pytest.mark.parametrize("a1", [0.21, 0.9])
def test_passes_of_a_proposal_are_those_of_the_algorithm(a1, k, gamma):
    """Against playing it, coin by coin."""
    coin, num_plays = random.Random(0), 20_000
    rounds = drafts = 0
    for _ in range(num_plays):
        proposed = 0
        while proposed < k:
            drafted = min(gamma, k - proposed - 1)
            accepted = 0
            while accepted < drafted and coin.random() < a1:
                accepted += 1
            proposed += accepted + 1
            rounds, drafts = rounds + 1, drafts + drafted
    played = (rounds / num_plays, drafts / num_plays)
    assert inner_loop(a1, k, gamma) == pytest.approx(played, rel=0.01)


# Limits and directions.


def test_budgets_cost_acceptance_as_in_the_lab():
    """docs/results.md, at 16,384 tokens: 0.943 of 4,096 down to 0.869 of 256."""
    measured = {4096: 0.943, 2048: 0.922, 1024: 0.905, 512: 0.887, 256: 0.869}
    for budget, acceptance in measured.items():
        assert Acceptance(0.943).at(budget) == pytest.approx(acceptance, abs=0.01)


@pytest.mark.parametrize("route", [DIRECT, LEVELS])
@pytest.mark.parametrize("context, batch", [(32_000, 1), (122_000, 1), (32_000, 8)])
def test_break_even_is_where_the_gain_begins(route, context, batch):
    """At its acceptance the setting is as fast as plain decoding, and no other of the route is
    faster."""
    its, among = predictor(), [s for s in settings(4096, (DRAFT,)) if s.route == route]
    point = its.break_even(among, context, batch, Acceptance(1.0))
    assert point["tokens"] == pytest.approx(
        tokens_per_step(point["acceptance"], point["setting"].num_tokens)
    )
    # Of a draft's tokens straight to the full pass, both levels' acceptances count.
    level2, draft = (point["acceptance"], 0.5) if route == LEVELS else (1.0, point["acceptance"])
    there = Acceptance(level2, draft)
    assert its.step(point["setting"], context, batch, there).speedup == pytest.approx(1.0)
    if route == DIRECT:
        assert its.best(among, context, batch, there).speedup == pytest.approx(1.0)
    else:
        assert not any(its.step(s, context, batch, there).speedup > 1 + 1e-6 for s in among)


def test_a_route_may_never_pay():
    slow = [Setting(LEVELS, 1, 0, 4096)]  # a pass of level 2 for one token
    assert predictor().break_even(slow, 8192, 1, Acceptance(0.9)) is None
    assert acceptance_for(7.0, 6) == pytest.approx(1.0)
    assert acceptance_for(1.0, 6) == pytest.approx(0.0, abs=1e-6)


def test_what_fits():
    assert not predictor("RTX-4090").fits(122_000, 1), "16 GB of weights and 16 of KV, in 24"
    assert predictor("RTX-4090").fits(8192, 1)
    assert not predictor("RTX-4090", "qwen3-30b-a3b").fits(16, 1)
    assert predictor("H200", "llama-2-7b-128k").fits(122_000, 1)
    assert not predictor("H200", "llama-2-7b-128k").fits(122_000, 4)


# What is read.


def config_of(folder, dtype="bfloat16", **keys):
    return ModelConfig(str(folder), skip_tokenizer_init=True, dtype=dtype, **keys)


def shapes(folder: Path) -> dict[str, int]:
    """Return the numbers of each tensor of a checkpoint but norms and indices."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {n: size for n, size in sizes.items() if "norm" not in n and n != "d2t"}


def test_a_config_is_read(tmp_path):
    embedded = Geometry.read(config_of(ROOT / "examples" / "models" / "target", "float32"))
    assert embedded.is_tied and embedded.weights == 5_308_416, "without norms"
    assert (embedded.bytes_each, embedded.kv_bytes_each) == (4, 4)
    moe = MODELS["qwen3-30b-a3b"]
    config = Qwen3MoeConfig(
        hidden_size=moe.hidden,
        num_hidden_layers=moe.layers,
        num_attention_heads=moe.heads,
        num_key_value_heads=moe.kv_heads,
        head_dim=moe.head_dim,
        vocab_size=moe.vocab,
        intermediate_size=6144,
        moe_intermediate_size=moe.inner,
        num_experts=moe.experts,
        num_experts_per_tok=moe.active_experts,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert Geometry.read(config_of(tmp_path)) == dataclasses.replace(moe, name=str(tmp_path))
    config.num_experts_per_tok = 0
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no number of experts for a token"):
        Geometry.read(config_of(tmp_path))


def test_a_heads_weights_are_those_of_its_checkpoint():
    folder = ROOT / "examples" / "models" / "smollm2_head"
    config = config_of(folder)
    head = Geometry.read_draft(config)
    assert head.weights == sum(shapes(folder).values())
    config.hf_config.draft_vocab_size = None
    assert Geometry.read_draft(config).weights > head.weights


def test_an_mtp_layers_weights_are_those_of_its_checkpoint(tmp_path):
    """And the output head's, which the target has as well."""
    folder = Path(make_mimo(tmp_path / "mimo", num_layers=3))
    config = config_of(folder, "float32", hf_overrides=SpeculativeConfig.hf_config_override)
    names = re.compile(r"lm_head.weight|.*[.]mtp_layers[.].*_proj[.]weight")
    wanted = sum(size for name, size in shapes(folder).items() if names.fullmatch(name))
    assert Geometry.read_draft(config).weights == wanted


def test_machines_are_read(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(dataclasses.asdict(MACHINES["H200"])))
    assert named_machine(str(file)) == named_machine("H200") == MACHINES["H200"]
    file.write_text('{"bandwith": 3}')
    with pytest.raises(ValueError, match=r"bandwidth is missing.*bandwith 3 is not accepted"):
        named_machine(str(file))
    with pytest.raises(ValueError, match="machine 'abacus' is no file"):
        named_machine("abacus")
    for wrong, named in [
        ({"bandwidth": 0}, "bandwidth 0 is not accepted: input should be greater than 0"),
        ({"flops_share": 1.1}, "flops_share 1.1 is not accepted: input should be less"),
        ({"launch_seconds": -1}, "launch_seconds -1 is not accepted"),
        ({"num_sms": 0, "splits_queries": False}, "give num_sms"),
    ]:
        file.write_text(json.dumps(dataclasses.asdict(MACHINES["H200"]) | wrong))
        with pytest.raises(ValueError, match=named):
            named_machine(str(file))
    assert machine_of("NVIDIA A100-SXM4-80GB") == MACHINES["A100-80GB"]
    assert machine_of("NVIDIA GeForce RTX 4090") == MACHINES["RTX-4090"]
    assert machine_of("NVIDIA GH200 480GB") == MACHINES["GH200"]
    assert machine_of("x86_64") is None


def test_a_cpu_is_measured():
    machine = measure_cpu(scale=0.01)
    assert machine.name
    assert 1e8 < machine.bandwidth < 1e13 and 1e8 < machine.flops < 1e15
    assert 1e-8 < machine.kernel_seconds < 1e-2
