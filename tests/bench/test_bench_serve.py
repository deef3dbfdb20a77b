"""Promise: the serving benchmark pairs the same work, favours no server, says what it measured."""

import asyncio
import io
import json
import os
import sys
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace as Thing

import pytest
from rich.console import Console

from tests.bench.test_bench import asked, results, stands_alone
from tests.bench.test_bench_run import arguments, run_command
from tests.models import ROOT
from vllm_triforce_bench.bench import measurement, methods, serve, serve_report, server
from vllm_triforce_bench.bench.grid import PairedSet, groups, whole_sets
from vllm_triforce_bench.bench.methods import CONTROL_VARIANT, Variant
from vllm_triforce_bench.bench.prompts import Prompts
from vllm_triforce_bench.console import Progress

STOCK, OURS = methods.variants(["stock", "triforce"], [1024], "T", None, {})


def traffic(**more):
    return asked(**dict(serve=True, requests_per_run=3, warmup=1, repetitions=2) | more)


# The order.


def test_a_method_and_the_control_take_turns_and_are_exchanged_halfway():
    found = groups([STOCK, OURS, CONTROL_VARIANT], 2)
    assert [[variant.method for variant in group] for group in found] == [
        ["stock", "triforce"],
        ["stock", "control"],
    ]
    settings = traffic(repetitions=5, batch_sizes=[1, 4], temperatures=[0.0, 1.0])
    sets = serve.sets(settings, 2)
    order = list(dict.fromkeys((paired.group, paired.repetition) for paired in sets))
    halves = {0: range(3), 1: range(3)}, {1: range(3, 5), 0: range(3, 5)}
    assert order == [(group, i) for half in halves for group in half for i in half[group]]
    assert len(set(sets)) == len(sets) == 2 * 5 * 4
    # A repetition is the whole grid, and temperatures follow each other.
    assert [paired[2:4] for paired in sets[:4]] == [(1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0)]


def test_servers_start_in_both_orders_and_turns_alternate(monkeypatch, tmp_path):
    started, loads = [], []

    @contextmanager
    def running(variant, model, arguments, log):
        started.append(variant.method)
        yield Thing(variant=variant, engine_counts=lambda: {"steps": 7})

    def load(self, server, servers, paired):
        numbers = self._numbers[paired.repetition, *paired[1:4]]
        loads.append((server.variant.method, paired.repetition, numbers))
        return {}

    monkeypatch.setattr(serve, "running", running)
    monkeypatch.setattr(serve.Measurement, "_load", load)
    monkeypatch.setattr(serve, "_REST_S", 0)
    settings = traffic(contexts=[8], kv_cache_gib=1)
    kept = measurement.Store(tmp_path, {})
    source = Prompts([[number] for number in range(settings.num_prompts)])
    parts = (settings, groups([STOCK, OURS, CONTROL_VARIANT], 2), kept, source)
    with Progress(Console(file=io.StringIO())) as progress:
        loop = serve.Measurement(*parts, None, None, progress)
        loop.run(serve.sets(settings, 2))
    halves = "stock triforce stock control", "control stock triforce stock"
    assert started == " ".join(halves).split()
    measured = [each for each in loads if each[1] >= 0]  # not those that warm up
    assert [method for method, *_ in measured] == started
    assert all(one[2] == other[2] for one, other in zip(measured[::2], measured[1::2]))
    assert [record["order"] for record in kept.records] == [0, 1, 0, 1, 1, 0, 1, 0]
    assert len(whole_sets(kept.records)) == 8 and kept.records[0]["steps"] == 0


def test_no_request_meets_its_prompt_in_the_prefix_cache():
    settings = traffic(contexts=[8, 16], batch_sizes=[1, 2], temperatures=[0.0, 1.0])
    numbers = list(settings.prompt_numbers().values())
    assert numbers[0].start == 0 and numbers[-1].stop == settings.num_prompts
    assert all(one.stop == other.start for one, other in pairwise(numbers))
    assert [len(each) for each in numbers] == 8 * [1] + 16 * [3]


# Servers and load.


def test_stock_has_no_plugin_and_both_have_this_code(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    ngram = Variant("ngram", None, {"method": "ngram"}, "stock ngram")
    for variant in (STOCK, CONTROL_VARIANT, ngram):
        assert "triforce" not in server.environment(variant)["VLLM_PLUGINS"].split(",")
    environment = server.environment(OURS)
    assert "VLLM_PLUGINS" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert server.flags({"a_b": True, "c": False, "d": None, "e": {"f": 1}, "g": 2}) == [
        *("--a-b", "--no-c", "--e", '{"f": 1}', "--g", "2")
    ]


def test_a_server_that_ends_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    command = "print('no memory'); raise SystemExit(9)"
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", command])
    with (
        pytest.raises(server.ServerFailed, match=r"(?s)'stock vLLM' ended with code 9.*no memory"),
        server.running(STOCK, "T", {}, tmp_path / "log"),
    ):
        raise AssertionError("it never answered")


def test_vllms_own_client_understands_the_arguments(monkeypatch):
    """It sends to a port where nobody listens: all requests fail, and are counted."""
    from vllm.benchmarks.serve import benchmark

    paired = PairedSet("float32", 8, 2, 0.6, 0, 0)
    settings = traffic(request_rate=200.0)
    found = serve.client_arguments("http://127.0.0.1:9", paired, [[1, 2], [3, 4, 5]], settings)
    assert found["extra_body"] == {"temperature": 0.6, "top_p": 0.9}
    result = asyncio.run(benchmark(**found))
    assert (result["completed"], result["failed"]) == (0, 2)
    greedy = serve.client_arguments("", paired._replace(temperature=0.0), [], traffic())
    assert greedy["request_rate"] == float("inf") and "top_p" not in greedy["extra_body"]


# Figures.


def record(variant, speed, *, repetition=0, group=0, batch_size=2):
    result = dict(output_throughput=speed, median_tpot_ms=1000 / speed, completed=4)
    result |= dict(median_ttft_ms=5.0, p99_tpot_ms=9.0, p99_ttft_ms=9.0, median_e2el_ms=9.0)
    if variant is OURS:
        result["spec_decode_acceptance_length"] = 2.5
    run = PairedSet("float32", 8, batch_size, 0.0, group, repetition)._asdict()
    run |= dict(method=variant.method, budget=variant.budget, label=variant.label, num_paired=2)
    return run | dict(steps=10 + repetition, preemptions=0, result=result)


def run_of(speeds, variant=OURS, **more):
    records = []
    for repetition, (before, after) in enumerate(speeds):
        records += [record(STOCK, before, repetition=repetition, **more)]
        records += [record(variant, after, repetition=repetition, **more)]
    return records


def test_rows_against_figures_computed_by_hand():
    records = run_of([(100, 150), (200, 500), (50, 50)])  # ratios 1.5, 2.5, 1
    records += run_of([(100, 102), (100, 90), (100, 98)], CONTROL_VARIANT, group=1)
    records += run_of([(100, 95)], batch_size=4)
    ours, control, uncontrolled = serve_report.summarize(records)
    assert (ours["throughput_ratio"], ours["throughput_ratio_max"]) == (1.5, 2.5)
    assert ours["throughput_stock"] == 100 and ours["throughput"] == 150
    assert ours["tpot_ratio"] == pytest.approx(1 / 1.5) and ours["ttft_ratio"] == 1
    assert ours["mean_acceptance_length"] == 2.5 and control["mean_acceptance_length"] is None
    assert serve_report.line(ours)["steps"].text == "11 / 11"
    verdicts = [row["verdict"] for row in (ours, control, uncontrolled)]
    assert verdicts == ["faster", "even", "slower"]


def test_slower_than_the_control_is_slower():
    control = run_of([(100, 96), (100, 103)], CONTROL_VARIANT, group=1)
    within, beyond = run_of([(100, 97)]), run_of([(100, 95)])
    assert serve_report.summarize(within + control)[0]["verdict"] == "even"
    assert serve_report.summarize(beyond + control)[0]["verdict"] == "slower"


def test_the_page_stands_alone_and_has_the_numbers():
    records = run_of([(123.4, 308.5)]) + run_of([(100, 101)], CONTROL_VARIANT, group=1)
    text = serve_report.make_page(results(serve_report.summarize(records))).render()
    stands_alone(text, 4, "123.4", "308.5", "2.50x", "a &lt;CPU&gt;", "1.01 to 1.01")


# The whole way.


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.thorough
def test_two_servers_are_measured_in_turns(pair, tmp_path):
    given = arguments(pair, "--serve", "--batch-sizes", "2", "--repetitions", "1", "--no-control")
    given += ["--output", str(tmp_path), "--requests-per-run", "4", "--warmup", "0"]
    engine = {"enforce_eager": True, "block_size": 32, "distributed_executor_backend": "uni"}
    given += ["--budgets", "128", "--dtypes", "float32", "--engine", json.dumps(engine)]
    given += ["--triforce", '{"min_context": 0, "adaptive": false}']
    shown = run_command(given)
    runs = [
        json.loads(line) for line in (tmp_path / measurement.MEASUREMENTS).read_text().splitlines()
    ]
    assert [(run["method"], run["order"]) for run in runs] == [("stock", 0), ("triforce", 1)]
    for run in runs:
        assert run["result"]["completed"] == 4 and run["result"]["failed"] == 0
        assert run["result"]["total_input_tokens"] == 4 * 300
        assert run["result"]["total_output_tokens"] == 4 * 16
        assert 0 < run["result"]["median_tpot_ms"] < run["result"]["median_ttft_ms"] * 1000
        assert run["steps"] > 0
    assert runs[1]["result"]["spec_decode_num_drafts"] > 0
    assert "spec_decode_num_drafts" not in runs[0]["result"]
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["throughput_ratio"] > 0 and row["pairs"] == 1
    assert f"{row['throughput_ratio']:.2f}x" in (tmp_path / "report.html").read_text()
    assert f"{row['throughput_ratio']:.2f}x" in shown
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 2
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "float32-0-0-stock.log",
        "float32-0-0-triforce.log",
    }
