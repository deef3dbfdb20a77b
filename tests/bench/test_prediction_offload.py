"""Promise: with KV in host memory a step is predicted from what crosses the link, and without it as
before."""

import dataclasses
import json
import re

import pytest

from tests.models import ROOT
from vllm_triforce import cli
from vllm_triforce.config import TriForceConfig
from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import MODELS
from vllm_triforce_bench.predict.machine import GIB, MACHINES, Machine, machine_of
from vllm_triforce_bench.predict.offload import DoesNotFit, OffloadedPredictor
from vllm_triforce_bench.predict.offload_cells import engine, first_batch_beyond, with_memory
from vllm_triforce_bench.predict.settings import DRAFT, LEVELS, STOCK, Acceptance, Setting
from vllm_triforce_bench.predict.steps import Predictor

CONTEXT = 124_928
LEVELS_16 = Setting(LEVELS, 16, 2, 4096, DRAFT)
ALONE_16 = Setting(LEVELS, 16, 0, 4096)


def offloaded(machine="RTX-4090", model="llama-2-7b-128k", batch=1, gib=23.5) -> OffloadedPredictor:
    limited = with_memory(MACHINES[machine], gib)
    return engine(limited, MODELS[model], CONTEXT, batch, [STOCK, LEVELS_16], Counts())


def on_device(its: OffloadedPredictor) -> Predictor:
    """The same, with all of its KV on the device, whether or not it fits."""
    return Predictor(its.machine, its.model, its.draft, its.counts)


# By hand.


def test_all_layers_of_7b_cross_in_2_6_seconds():
    """124,928 tokens of 2 x 32 layers x 32 heads x 128 numbers x 2 bytes, at 25 GB/s."""
    its = offloaded()
    assert its.placement.num_device_layers == 0
    assert its.full_pass_bytes([CONTEXT]) == 124_928 * 524_288
    assert its.full_pass_bytes([CONTEXT]) / 1e9 == pytest.approx(65.5, abs=0.01)
    added = its.plain_pass(CONTEXT, 1).seconds - on_device(its).plain_pass(CONTEXT, 1).seconds
    assert added == pytest.approx(2.6199 + 32 * 1.2e-6, abs=1e-4)
    assert its.full_pass([17], [CONTEXT]).seconds == its.uniform_full_pass(1, 17, CONTEXT).seconds
    assert its.plain_pass(CONTEXT, 1).limit_seconds == pytest.approx(2.6199, abs=1e-4)


@pytest.mark.parametrize(
    "gib, on_the_device, gigabytes, seconds", [(23.5, 4, 14.33, 0.5731), (26.2, 9, 11.77, 0.4708)]
)
def test_layers_on_the_device_do_not_cross(gib, on_the_device, gigabytes, seconds):
    """8B with grouped heads: 4,096 bytes a token and layer; 28 and 23 of 32 layers cross."""
    card = dataclasses.replace(MACHINES["RTX-4090"], memory_bytes=gib * GIB)
    its = engine(card, MODELS["llama-3.1-8b"], CONTEXT, 1, [LEVELS_16], Counts())
    assert its.placement.num_device_layers == on_the_device
    assert its.full_pass_bytes([CONTEXT]) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    added = its.plain_pass(CONTEXT, 1).seconds - on_device(its).plain_pass(CONTEXT, 1).seconds
    assert added == pytest.approx(seconds, abs=1e-4)


def test_what_lies_on_the_device_fits_and_no_more_would():
    """16.06 GB of weights, 0.4 of the draft's and 2.5 beside them leave 3.7 of 0.9 x 23.5 GiB: for
    4 layers, a staging layer, means of a 32nd of all and the pool of the others."""
    its = offloaded(model="llama-3.1-8b")
    layer = its.placement.num_blocks * 65_536
    assert layer / 1e9 == pytest.approx(0.513, abs=0.001)
    pool = its.config.table_width * 65_536
    needed = [(n + 2) * layer + (32 - n) * pool for n in (4, 5)]
    assert needed[0] <= its.device_bytes < needed[1]
    assert its.device_bytes / 1e9 == pytest.approx(3.7, abs=0.1)
    alone = its.without_speculation()
    assert alone.placement.num_device_layers == 7
    assert 8 * layer <= alone.device_bytes < 9 * layer, "staging and KV, nothing else"


def test_what_is_brought_to_the_pool():
    """4,096 tokens of 524,288 bytes every 8 steps, and two blocks of 16 tokens every step; 4
    launches."""
    its = offloaded()
    assert its.refresh_bytes(1) == 4096 * 524_288 and its.tail_bytes(1) == 32 * 524_288
    added = its.selection_seconds(1, CONTEXT) - on_device(its).selection_seconds(1, CONTEXT)
    assert added == pytest.approx(10.737e-3 + 0.671e-3 + 4 * 5e-6, abs=1e-5)
    assert its.level2_pass(1, 3, 4096, CONTEXT) == on_device(its).level2_pass(1, 3, 4096, CONTEXT)


@pytest.mark.parametrize("length, blocks", [(1, 2), (16, 2), (17, 3), (32, 3), (33, 4)])
def test_blocks_that_a_full_pass_can_touch(length, blocks):
    """``length + 1`` tokens from the last place of a block on."""
    its = offloaded()
    its.config = dataclasses.replace(its.config, num_speculative_tokens=length)
    assert its.tail_bytes(1) == blocks * 16 * 524_288
    assert blocks == (15 + length) // 16 + 1


@pytest.mark.parametrize("machine", ["RTX-4090", "H200", "GH200"])
def test_a_step_is_its_parts(machine):
    """(full pass + 16 passes of level 2) / tokens, and little else."""
    its = offloaded(machine)
    step, plain = (its.step(s, CONTEXT, 1, Acceptance(0.93)) for s in (ALONE_16, STOCK))
    assert step.tokens == pytest.approx((1 - 0.93**17) / (1 - 0.93)) == pytest.approx(10.126, 1e-4)
    assert step.speedup == pytest.approx(step.tokens * plain.seconds / step.seconds)
    passes = its.uniform_full_pass(1, 17, CONTEXT).seconds
    passes += 16 * its.level2_pass(1, 1, 4096, CONTEXT).seconds
    assert passes < step.seconds < 1.03 * passes
    assert its.crossing(its.full_pass_bytes([CONTEXT])) < plain.seconds < step.seconds
    assert step.speedup < step.tokens


def test_requests_cross_one_after_the_other():
    its = offloaded("H200", "llama-3.1-8b", batch=8, gib=139)
    assert its.full_pass_bytes([CONTEXT] * 8) == 8 * its.full_pass_bytes([CONTEXT])
    assert its.refresh_bytes(8) == 8 * its.refresh_bytes(1)
    assert its.config.max_speculating_seqs == 8
    assert first_batch_beyond(MACHINES["H200"], MODELS["llama-3.1-8b"], CONTEXT) == 8
    assert first_batch_beyond(MACHINES["H200"], MODELS["llama-2-7b-128k"], CONTEXT) == 2


def test_the_engine_has_the_defaults():
    """Of Model Runner V2 with a draft, where one request runs at a time; it needs no pool for
    four."""
    asked = TriForceConfig(kv_offload_gib=64.0).with_defaults(True, "draft", True, 1).resolve(16)
    limited = with_memory(MACHINES["RTX-4090"], 23.5)
    longest = Setting(LEVELS, 32, 2, 4096, DRAFT)
    its = engine(limited, MODELS["llama-2-7b-128k"], CONTEXT, 1, [STOCK, longest], Counts())
    for name in ("num_speculative_tokens", "gamma", "table_width", "retrieval_budget"):
        assert getattr(its.config, name) == getattr(asked, name)
    assert (asked.max_speculating_seqs, its.config.max_speculating_seqs) == (4, 1)
    assert (its.config.num_speculative_tokens, its.config.gamma) == (32, 2)
    assert (its.refresh_interval, its.chunk) == (8, 16)


# What is refused.


def test_a_machine_with_an_unknown_link_is_refused():
    with pytest.raises(ValueError, match="'A100-80GB' has no host_bandwidth"):
        offloaded("A100-80GB")
    with pytest.raises(ValueError, match="host_bandwidth=0"):
        Machine("slow", 1.0, 1.0, 1.0, host_bandwidth=0.0)


def test_what_does_not_fit_with_its_kv_in_host_memory():
    with pytest.raises(DoesNotFit, match=r"kv_offload_gib=62: \d+ tokens fit, fewer than"):
        offloaded(gib=17)
    with pytest.raises(DoesNotFit, match="tokens fit, fewer than 2 x 125184"):
        offloaded(batch=2)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--machines", "A100-80GB"], "machine 'A100-80GB' has no host_bandwidth"),
        (["--machines", "RTX-4090,A100-80GB", "--format", "json"], "no host_bandwidth"),
        (["--device-gib", "0"], "--device-gib=0 leaves nothing"),
        (["--acceptances", "2"], "level2=2.0 is no share"),
    ],
)
def test_bad_input_is_said(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["predict", "--offload", *given])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# What is shown.


def test_the_page_is_written_by_the_command(tmp_path):
    file = tmp_path / "page.md"
    assert cli.main(["predict", "--offload", "--output", str(file)]) == 0
    page = file.read_text()
    assert f"    vllm-triforce predict --offload --output {file}" in page
    assert "Everything on this page is **predicted**" in page
    for said in ("arXiv 2404.11912", "arXiv 2605.17613", "7x for llama-2-7b-128k", "5x for llama"):
        assert said in page
    its = offloaded()
    best = its.step(dataclasses.replace(LEVELS_16, num_tokens=32), CONTEXT, 1, Acceptance(0.93))
    (row,) = [line for line in page.splitlines() if "4090, llama-2-7b-128k | 124,928 x 1" in line]
    assert f"**{best.speedup:.2f}x**" in row and "0 of 32 | 65.5 |" in row
    share = its.crossing(its.full_pass_bytes([CONTEXT])) / best.seconds
    assert f"{1e3 * best.seconds / best.tokens:,.1f} ({share:.0%})" in row


def test_cells_as_json(capsys):
    given = ["predict", "--offload", "--format", "json", "--models", "llama-3.1-8b,qwen3-30b-a3b"]
    assert cli.main([*given, "--machines", "H200", "--device-gib", "60"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["kind"] for cell in found} == {"predicted"}
    dense, experts = found
    assert dense["all_would_fit"] and dense["target"] == 5 and dense["device_gib"] == 60
    assert not experts["fits"] and "kv_offload_gib" in experts["why"]
    for step in (dense["plain"], *dense["best"]):
        assert 0 < step["share_of_limit"] < 1


def test_a_machine_of_a_file_has_a_link(tmp_path, capsys):
    file = tmp_path / "machine.json"
    wide = dataclasses.replace(MACHINES["A100-80GB"], name="wide", host_bandwidth=1e11)
    file.write_text(json.dumps(dataclasses.asdict(wide)))
    given = ["predict", "--offload", "--format", "json", "--models", "llama-2-7b-128k"]
    assert cli.main([*given, "--machines", str(file)]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert cell["crossing_ms"] == pytest.approx(655, abs=0.1)


# Without it.


def test_without_it_nothing_has_changed(capsys):
    """The selection of docs/prediction.md, written before any of this."""
    page = (ROOT / "docs" / "prediction.md").read_text()
    command = re.search(r"By `vllm-triforce (predict [^`]+)`", page)
    assert command and cli.main(command.group(1).split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 15 and all(row in page for row in rows)


def test_a_gh200_is_no_h200():
    assert machine_of("NVIDIA GH200 480GB") == MACHINES["GH200"]
    assert machine_of("NVIDIA H200") == MACHINES["H200"]
    assert MACHINES["GH200"].host_bandwidth == 375e9
