"""Promise: what is predicted follows from bytes, arithmetic and launches, and from nothing else."""

import dataclasses
import json
import random
import re
from itertools import pairwise

import pytest

from tests.models import ROOT
from vllm_triforce import cli
from vllm_triforce_bench.predict.beside import beside
from vllm_triforce_bench.predict.constants import measure_machine
from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import MODELS, Geometry, draft_of
from vllm_triforce_bench.predict.machine import MACHINES, Machine, machine_of
from vllm_triforce_bench.predict.passes import model_pass
from vllm_triforce_bench.predict.settings import (
    DIRECT,
    DRAFT,
    LEVELS,
    LOOKUP,
    PLAIN,
    STOCK,
    Acceptance,
    Setting,
    settings,
)
from vllm_triforce_bench.predict.speedup import speedup
from vllm_triforce_bench.predict.steps import Predictor
from vllm_triforce_bench.predict.validate import validation

LEVELS_6 = Setting(LEVELS, 6, 2, 4096, DRAFT)
SETTINGS = [STOCK, Setting(DIRECT, 3, source=DRAFT), Setting(DIRECT, 4, source=LOOKUP), LEVELS_6]
SETTINGS += [Setting(LEVELS, 12, 4, 1024, LOOKUP), Setting(LEVELS, 4, 0, 512)]


def predictor(machine="H200", model="llama-3.1-8b", counts=None) -> Predictor:
    its = MODELS[model]
    return Predictor(MACHINES[machine], its, draft_of(its), counts or Counts())


# By hand.


def test_sizes_are_those_of_the_models():
    billions = {name: model.weights / 1e9 for name, model in MODELS.items()}
    assert billions == pytest.approx(
        {
            "llama-2-7b-128k": 6.74,
            "llama-3.1-8b": 8.03,
            "qwen3-8b": 8.19,
            "qwen3-30b-a3b": 30.53,
        },
        abs=0.005,
    )
    moe = MODELS["qwen3-30b-a3b"]
    active = moe.dense_weights + moe.layers * moe.active_experts * moe.expert_weights
    assert active / 1e9 == pytest.approx(3.04, abs=0.01), "3.3 with the embedding"
    assert MODELS["llama-3.1-8b"].weight_bytes / 1e9 == pytest.approx(16.06, abs=0.01)
    assert 8192 * MODELS["llama-3.1-8b"].kv_bytes_per_token / 1e9 == pytest.approx(1.07, abs=0.01)


def test_a_pass_is_its_bytes_over_bandwidth():
    """8B, grouped heads, at 8,192 tokens: 15.0 GB of weights without the embedding's rows, 1.07 of
    KV; level 2 reads half of that, so it costs 97 % of a full pass."""
    full = predictor().plain_pass(8192, 1)
    assert full.limit_seconds == pytest.approx((15.01e9 + 1.074e9) / 4.8e12, rel=1e-3)
    level2 = predictor().level2_pass(1, 3, 4096, 8192)
    assert level2.limit_seconds / full.limit_seconds == pytest.approx(0.967, abs=0.002)
    assert level2.seconds / full.seconds == pytest.approx(0.97, abs=0.01)
    reached = 0.85 * 4.8e12
    graph = 15e-6 + (32 * 9 + 4) * 1.2e-6
    assert full.seconds == pytest.approx((15.01e9 + 1.074e9) / reached + graph, rel=1e-3)


def test_a_large_batch_is_bound_by_arithmetic():
    """7.5 G weights but for the embedding, 2 operations each, 2,048 tokens."""
    machine = dataclasses.replace(MACHINES["H200"], kernel_seconds=0.0, graph_launch_seconds=0.0)
    found = model_pass(machine, MODELS["llama-3.1-8b"], Counts(), [1] * 2048, [0] * 2048)
    assert found.limit_seconds == pytest.approx(2 * 7.505e9 * 2048 / 989e12, rel=1e-3)
    assert found.seconds == pytest.approx(found.limit_seconds / 0.6, rel=1e-6)


def test_launches_are_counted_where_no_graph_holds_them():
    counts = Counts(round_kernels=22, logits_reads=0)
    none = dataclasses.replace(counts, round_kernels=0)
    ours, free = (predictor(counts=c).costs(LEVELS_6, 8192, 1) for c in (counts, none))
    assert ours.verification - free.verification == pytest.approx(22 * 5e-3)
    assert dataclasses.replace(ours, verification=0.0) == dataclasses.replace(
        free, verification=0.0
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 56, 448])
def test_experts_that_a_pass_reads(num_tokens):
    """Against drawing them: 8 of 128 for each token."""
    draw, model, times = random.Random(0), MODELS["qwen3-30b-a3b"], 200
    touched = 0
    for _ in range(times):
        seen: set[int] = set()
        for _ in range(num_tokens):
            seen.update(draw.sample(range(model.experts), model.active_experts))
        touched += len(seen)
    assert model.experts_touched(num_tokens) == pytest.approx(touched / times, rel=0.01)


def test_flash_attention_2_does_not_split_the_kv_of_longer_queries():
    a100, h200 = MACHINES["A100-80GB"], MACHINES["H200"]
    assert a100.occupancy(1, 7, 32, 8) == pytest.approx(32 / 108)
    assert a100.occupancy(1, 1, 32, 8) == 1.0, "grouped heads and one token: split"
    assert a100.occupancy(1, 1, 32, 32) == pytest.approx(32 / 108), "heads not grouped: never"
    assert a100.occupancy(4, 7, 32, 8) == 1.0
    assert a100.occupancy(1, 65, 32, 8) == pytest.approx(64 / 108)
    assert h200.occupancy(1, 7, 32, 32) == 1.0
    plain, verified = (predictor("A100-80GB").full_pass([q], [122_000]) for q in (1, 7))
    kv = 122_000 * 131_072 / (0.85 * 2.039e12)
    assert verified.seconds - plain.seconds == pytest.approx(kv * (108 / 32 - 1), rel=0.01)


# Limits and directions.


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_faster_than_its_bytes(machine, model):
    its = predictor(machine, model)
    for context, batch in ((4096, 1), (32_768, 4), (122_000, 64)):
        for setting in SETTINGS:
            step = its.step(setting, context, batch, Acceptance(0.9))
            assert 0 < step.share_of_limit < 1
            least = batch * context * MODELS[model].kv_bytes_per_token / MACHINES[machine].bandwidth
            assert step.seconds > least
            assert 0 < step.share_outside < 0.5


def test_more_takes_longer():
    its = predictor("A100-80GB", "qwen3-30b-a3b")

    def rises(values):
        values = list(values)
        assert all(a <= b for a, b in pairwise(values)) and values[0] < values[-1]

    rises(its.full_pass([1], [c]).seconds for c in (1000, 10_000, 100_000))
    rises(its.full_pass([1] * n, [1000] * n).seconds for n in (1, 2, 8, 64))
    rises(its.full_pass([q], [10_000]).seconds for q in (1, 2, 7, 17))
    rises(its.level2_pass(1, 3, budget, 100_000).seconds for budget in (512, 1024, 4096))
    rises(its.draft_pass(n, 8000).seconds for n in (1, 8, 64))
    rises(its.step(LEVELS_6, 32_000, 1, Acceptance(a)).speedup for a in (0.0, 0.5, 0.9, 1.0))
    rises(its.step(LEVELS_6, c, 1, Acceptance(0.95)).speedup for c in (8000, 32_000, 122_000))
    rises(Acceptance(0.9).at(budget) for budget in (512, 1024, 4096, 8192))


def test_budgets_cost_acceptance_as_in_the_lab():
    """docs/results.md, at 16,384 tokens: 0.943 of 4,096 down to 0.869 of 256."""
    measured = {4096: 0.943, 2048: 0.922, 1024: 0.905, 512: 0.887, 256: 0.869}
    for budget, acceptance in measured.items():
        assert Acceptance(0.943).at(budget) == pytest.approx(acceptance, abs=0.01)


@pytest.mark.parametrize("setting", SETTINGS[1:])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_parts_of_a_step_are_its_speedup(setting, machine):
    its, acceptance = predictor(machine), Acceptance(0.85, 0.6, 0.4)
    step, stock = (its.step(s, 16_384, 2, acceptance) for s in (setting, STOCK))
    assert step.speedup == pytest.approx(step.tokens * stock.seconds / step.seconds)
    if setting.route == LEVELS:
        rate = acceptance.by_level2(setting.source)
        costs = its.costs(setting, 16_384, 2)
        k, gamma, level2 = setting.num_tokens, setting.gamma, acceptance.at(setting.budget)
        assert step.speedup == pytest.approx(speedup(costs, level2, rate, k, gamma))


def test_what_fits():
    assert not predictor("RTX-4090").fits(122_000, 1), "16 GB of weights and 16 of KV, in 24"
    assert predictor("RTX-4090").fits(8192, 1)
    assert not predictor("RTX-4090", "qwen3-30b-a3b").fits(16, 1)
    assert predictor("H200", "llama-2-7b-128k").fits(122_000, 1)
    assert not predictor("H200", "llama-2-7b-128k").fits(122_000, 4)


def test_where_to_step_aside():
    def best(machine, model, context, batch, acceptance):
        return predictor(machine, model).best(settings(), context, batch, acceptance)

    assert best("H200", "qwen3-30b-a3b", 4096, 8, Acceptance(0.8)).setting.route == PLAIN
    assert best("A100-80GB", "llama-3.1-8b", 122_000, 1, Acceptance(0.6)).setting.route == PLAIN
    hopeless = best("H200", "llama-3.1-8b", 8192, 1, Acceptance(0.5, 0.0, 0.0))
    assert hopeless.setting == STOCK and hopeless.speedup == 1.0
    long = best("H200", "llama-2-7b-128k", 122_000, 1, Acceptance(0.95))
    assert long.setting.route == LEVELS and long.speedup > 3
    alone = Predictor(MACHINES["H200"], MODELS["llama-3.1-8b"])
    assert alone.best(settings(), 8192, 1, Acceptance(0.9)).setting.source != DRAFT


# What is read.


def test_a_config_is_read(tmp_path):
    embedded = Geometry.load(ROOT / "examples" / "models" / "target")
    assert embedded.is_tied and embedded.weights == 5_308_416, "without norms"
    assert embedded.weight_bytes_each == 2
    moe = {
        "text_config": {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "torch_dtype": "bfloat16",
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(moe))
    named = dataclasses.replace(MODELS["qwen3-30b-a3b"], name=tmp_path.name)
    assert Geometry.load(tmp_path) == named
    moe["text_config"]["kv_lora_rank"] = 512
    (tmp_path / "config.json").write_text(json.dumps(moe))
    with pytest.raises(ValueError, match="kv_lora_rank: latent attention is not counted"):
        Geometry.load(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(ValueError, match="has no 'num_attention_heads'"):
        Geometry.load(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        Geometry.load(tmp_path / "nowhere.json")


def test_counts_and_machines_are_read(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text('{"round_kernels": 3}')
    assert Counts.load(file) == Counts(round_kernels=3)
    file.write_text('{"rounds": 3}')
    with pytest.raises(ValueError, match=r"'rounds'\], which is not known"):
        Counts.load(file)
    with pytest.raises(ValueError, match="below 0"):
        Counts(round_kernels=-1)
    with pytest.raises(ValueError, match="bandwidth=0"):
        Machine("slow", 1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="give num_sms"):
        Machine("half", 1.0, 1.0, 1.0, splits_queries=False)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--machines", "abacus"], "machine 'abacus' is no file"),
        (["--models", "gpt-9"], "model 'gpt-9' is none of"),
        (["--contexts", "4Q"], "--contexts has '4Q'"),
        (["--acceptances", "1.5"], "level2=1.5 is no share"),
        (["--budgets", "0"], "--budgets has '0'"),
        (["--validate", "nowhere.json"], "--machines has 3"),
        (["--validate", "nowhere.json", "--machines", "H200"], "no file of measured passes"),
    ],
)
def test_bad_input_is_said(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["predict", *given])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# What is shown.


def test_the_table_says_that_it_is_predicted(capsys):
    given = [
        "predict",
        "--machines",
        "RTX-4090",
        "--models",
        "llama-3.1-8b",
        "--contexts",
        "8K,64K",
    ]
    assert cli.main([*given, "--batch-sizes", "1", "--acceptances", "0.9"]) == 0
    text = capsys.readouterr().out
    assert "### llama-3.1-8b on RTX-4090, predicted" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 8,192 x 1")]
    best = predictor("RTX-4090").best(settings(), 8192, 1, Acceptance(0.9))
    assert f"{best.speedup:.2f}x {best.setting}; {best.share_of_limit:.0%}" in row
    assert "Does not fit into memory: 65,536 x 1 (25 GB)" in text
    assert cli.main([*given, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["kind"] for cell in found} == {"predicted"}
    assert sum(cell["fits"] for cell in found) == 1
    assert cli.main(["predict", "--paper"]) == 0
    assert "| 122,000 x 1 | 2.31x | 3." in capsys.readouterr().out


def test_predictions_stand_beside_measurements():
    assert machine_of("NVIDIA A100-SXM4-80GB") == MACHINES["A100-80GB"]
    assert machine_of("NVIDIA GeForce RTX 4090") == MACHINES["RTX-4090"]
    costs = predictor().costs(LEVELS_6, 8000, 2)
    measured = {name: 2 * ms for name, ms in dataclasses.asdict(costs).items()}
    cell = {"geometry": "llama-3.1-8b", "budget": 4096, "cell": "8000x2", "costs_ms": measured}
    line = beside("NVIDIA H200", cell)
    assert line.startswith("predicted") and f"stock_step {costs.stock_step:.2f} (2.00)" in line
    assert line.count("(2.00)") == 6
    assert beside("x86_64", cell) == "" and beside("NVIDIA H200", cell | {"geometry": "a"}) == ""


# Against what is measured.


def test_a_machine_is_measured(tmp_path):
    file = tmp_path / "machine.json"
    assert json.loads(measure_machine(file, scale=0.01))["name"]
    found = Machine.load(file)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.flops < 1e15
    assert 1e-8 < found.kernel_seconds < 1e-2


def test_a_validation_of_a_world_that_is_as_predicted(tmp_path):
    """Every ratio is 1 and every rank agrees; a step twice as long is seen."""
    model = Geometry("small", 1024, 24, 16, 16, 64, 4096, 32000).with_bytes(4)
    machine = Machine("cpu", 24e9, 15e9, 200e9, launch_seconds=1e-5, kernel_seconds=1e-5)
    its = Predictor(machine, model, draft_of(model))
    measured = []
    for setting in (STOCK, Setting(DIRECT, 3, source=DRAFT), Setting(LEVELS, 6, 2, 1024, DRAFT)):
        costs = its.costs(setting, 32_000, 1)
        cell = {"model": dataclasses.asdict(model), "context": 32_000, "batch": 1}
        cell |= {"setting": dataclasses.asdict(setting), "step_ms": costs.stock_step}
        if setting != STOCK:
            rounds, steps = (4.0, 9.0) if setting.route == LEVELS else (0.0, 3.0)
            parts = {"level 1": steps * costs.level1_step}
            if setting.route == LEVELS:
                parts |= {"level 2": rounds * costs.level2_pass, "selection": costs.selection}
                parts["verification"] = rounds * costs.verification
            cell |= {"step_ms": costs.full_pass + sum(parts.values()), "parts_ms": parts}
            cell |= {"rounds": rounds, "level1_steps": steps}
        measured.append(cell)
    file = tmp_path / "passes.json"
    file.write_text(json.dumps({"cells": measured}))
    text = validation(machine, Counts(), [file])
    assert "1.00 (geometric mean of 3), 1.00 to 1.00" in text
    agreed = re.findall(r"(\d) of (\d) pairs in the same order", text)
    assert len(agreed) == 3 and all(one == other != "0" for one, other in agreed)
    measured[0]["step_ms"] *= 2
    file.write_text(json.dumps({"cells": measured}))
    assert "1.26 (geometric mean of 3), 1.00 to 2.00" in validation(machine, Counts(), [file])
    # While it was measured the machine was half as fast.
    slow = dataclasses.replace(machine, bandwidth=7.5e9, flops=100e9, kernel_seconds=2e-5)
    slow = dataclasses.replace(slow, launch_seconds=2e-5)
    measured[0]["machine"] = dataclasses.asdict(slow)
    file.write_text(json.dumps({"cells": measured}))
    text = validation(machine, Counts(), [file])
    assert "1.00 (geometric mean of 3), 1.00 to 1.00" in text
    assert re.findall(r"(\d) of (\d) pairs in the same order", text) == agreed


def test_the_cells_of_the_results_can_be_validated():
    """Stock vLLM's cells of docs/results.md."""
    file = ROOT / "tests" / "bench" / "stock_cells.json"
    machine = Machine("a CPU", 24e9, 17e9, 200e9, 1.0, launch_seconds=1e-5, kernel_seconds=1e-5)
    text = validation(machine, Counts(), [file])
    assert text.count("| the embedded target |") == 21
