"""Promise: the serving benchmark pairs the same work, favours no server, says what it measured."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.bench.test_bench import stands_alone
from tests.models import PROMPTS, ROOT
from vllm_triforce import cli
from vllm_triforce_bench.bench import BadInput, store
from vllm_triforce_bench.bench.serve import (
    cells,
    contenders,
    load,
    page,
    schedule,
    server,
    summary,
)
from vllm_triforce_bench.bench.serve import requests as requests_module
from vllm_triforce_bench.bench.serve.cells import Cell
from vllm_triforce_bench.bench.serve.schedule import Contest
from vllm_triforce_bench.bench.serve.settings import ServeSettings

OURS, CONTROL = Contest("triforce", "stock"), Contest("control", "stock")


def cell(text="random", **more) -> Cell:
    fields = dict(input_len=8, output_len=4, request_rate=None, concurrency=2, temperature=0.0)
    return Cell(text=text, **{**fields, **more})


def asked(*wanted: Cell, **more) -> ServeSettings:
    fields = dict(target="T", draft=None, prompts="TEXT", cells=list(wanted or [cell()]), pairs=2)
    fields |= dict(requests_per_run=3, warmup=1, contests=[OURS], others={}, budget=1024)
    fields |= dict(dtype="float32", top_p=0.9, seed=0, triforce_keys={}, engine_keys={})
    fields |= dict(kv_cache_gib=None, max_num_seqs=2, run_limit=60)
    return ServeSettings(**{**fields, **more})


# Arguments.


def arguments(pair, *more: str) -> list[str]:
    given = ["bench", "--serve", "--target", pair["target"], "--draft", pair["draft"]]
    given += ["--prompts", str(PROMPTS / "held_out.txt")]
    return [*given, *more]


MISTAKES = [
    (
        ["--texts", "prose"],
        "text prose is not accepted: input should be 'random', 'held-out' or 'mixed'",
    ),
    (["--prompts", "/no/such/file"], "there is no such file"),
    (
        ["--concurrencies", "0"],
        "concurrency 0 is not accepted: input should be greater than or equal to 1",
    ),
    (
        ["--request-rates", "0"],
        "--request-rates: 0 is not accepted: input should be greater than 0",
    ),
    (
        ["--request-rates", "x"],
        "--request-rates: x is not accepted: input should be a valid number",
    ),
    (
        ["--temperatures", "3"],
        "temperature 3.0 is not accepted: input should be less than or equal to 2",
    ),
    (["--pairs", "0"], "--pairs: 0 is not accepted: input should be greater than 0"),
    (["--pairs", "5000"], "different prompts of up to 4096 need"),
    (["--input-lens", "16000000"], "has 65536: use shorter ones"),
    (["--budgets", "1K,2K"], "one value with --serve"),
    (["--contexts", "4K"], "--contexts does nothing with --serve; use --input-lens"),
    (["--other", "before"], "write NAME=PATH"),
    (["--other", "before=/nowhere"], "holds no package vllm_triforce"),
    (["--other", f"stock={ROOT}"], "the name 'stock' is taken"),
    (["--contests", "triforce/before"], "'before' is unknown; write CHALLENGER/BASELINE"),
    (["--contests", "stock/stock"], "a second stock server is control"),
    (["--engine", '{"port": 1}'], "'port' in --engine is set by the benchmark"),
    (["--triforce", '{"gama": 3}'], "did you mean 'gamma'"),
    (["--sequence", "/no/such/file"], "cannot be read"),
    (["--target", "./nowhere"], "not a folder with a config.json"),
]


@pytest.mark.parametrize("mistake, says", MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_said_before_any_server_starts(
    mistake, says, pair, tmp_path, monkeypatch, capsys
):
    from vllm_triforce_bench.bench.serve import measure

    def started(*args, **kwargs):
        raise AssertionError("a server was started")

    monkeypatch.setattr(measure, "running", started)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(pair, "--output", str(tmp_path / "out"), *mistake))
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert re.search(re.escape(says), " ".join(found.split())), found


def test_a_text_is_needed_only_where_one_is_read(pair, capsys):
    given = ["bench", "--serve", "--target", pair["target"], "--texts", "random,mixed"]
    with pytest.raises(SystemExit):
        cli.main(given)
    assert "text 'mixed' is cut from a file; give --prompts FILE" in capsys.readouterr().err


def test_an_option_of_the_other_benchmark_is_refused(pair, capsys):
    given = [word for word in arguments(pair, "--pairs", "3") if word != "--serve"]
    with pytest.raises(SystemExit):
        cli.main(given)
    assert "--pairs does nothing without --serve" in capsys.readouterr().err


def test_temperatures_follow_each_other_in_the_grid():
    found = cells.grid(["random"], [8], [4], [None, 2.0], [1, 4], [0.0, 1.0])
    assert [one.temperature for one in found] == 4 * [0.0, 1.0]
    assert [one.concurrency for one in found] == 2 * [1, 1, 4, 4]


def test_a_sequence_of_cells_from_a_file(tmp_path):
    path = tmp_path / "cells.json"
    one = {"text": "random", "input_len": 8, "output_len": 4, "concurrency": 2, "temperature": 0}
    path.write_text(json.dumps([one, one | {"temperature": 1, "request_rate": "inf"}, one]))
    assert cells.from_file(path) == [cell(), cell(temperature=1), cell()]
    path.write_text(json.dumps([one | {"temprature": 1}]))
    with pytest.raises(BadInput, match="cell 0: temprature 1 is not accepted: unexpected keyword"):
        cells.from_file(path)


# The order.


def test_roles_are_exchanged_halfway_and_turns_alternate():
    found = schedule.phases([OURS, CONTROL], 5)
    assert [(p.contest.name, p.half, list(p.pairs)) for p in found] == [
        ("triforce/stock", 0, [0, 1, 2]),
        ("control/stock", 0, [0, 1, 2]),
        ("control/stock", 1, [3, 4]),
        ("triforce/stock", 1, [3, 4]),
    ]
    assert [p.start_order[0] for p in found] == ["baseline"] * 2 + ["challenger"] * 2
    pairs = found[0].schedule(num_cells=2)
    assert [(pair.pair, pair.cell_index) for pair in pairs][:3] == [(0, 0), (0, 1), (1, 0)]
    of_a_cell = [pair.roles[0] for pair in pairs if pair.cell_index == 0]
    assert of_a_cell == ["baseline", "challenger", "baseline"]
    assert [p.half for p in schedule.phases([OURS], 1)] == [0]


# Requests.


def made(settings, length=200, bos=None):
    return requests_module.Requests(settings, range(1000, 1000 + length), range(100), bos)


def test_a_pair_has_its_own_requests_the_same_whenever_it_is_asked():
    settings = asked(cell("held-out"), cell("random"), cell("held-out", temperature=1.0))
    found, again = made(settings), made(settings)
    seen = set()
    for pair in range(2):
        for i in range(3):
            prompts = found.of(pair, i)
            assert prompts == again.of(pair, i)
            assert [len(prompt) for prompt in prompts] == [8] * 3
            seen |= {tuple(prompt) for prompt in prompts}
    warm = {tuple(prompt) for i in range(3) for prompt in found.warmup(i)}
    assert len(seen) == 2 * 3 * 3 and not seen & warm


def test_mixed_requests_are_one_random_one_from_the_text():
    prompts = made(asked(cell("mixed"), requests_per_run=4)).of(0, 0)
    assert [prompt[0] >= 1000 for prompt in prompts] == [False, True, False, True]
    (text,) = {prompt[1] - prompt[0] for prompt in prompts[1::2]}
    assert text == 1  # in a row


def test_a_first_token_of_the_tokenizer_comes_first():
    prompts = made(asked(cell("mixed")), bos=7).of(0, 0)
    assert all(prompt[0] == 7 and len(prompt) == 8 for prompt in prompts)
    assert all(7 not in prompt[1:] or prompt[1] < 100 for prompt in prompts)


def test_a_text_that_is_too_short_is_refused():
    needed = 2 * 3 + 1  # two pairs of three requests, and one to warm up
    assert made(asked(cell("held-out")), length=needed + 8)
    with pytest.raises(BadInput, match="use a longer text"):
        made(asked(cell("held-out")), length=needed + 7)
    assert made(asked(cell("random")), length=0)


def test_requests_by_default_are_a_multiple_of_the_concurrency():
    settings = asked(requests_per_run=None, warmup=None)
    assert settings.num_requests(cell(concurrency=1)) == 16
    assert settings.num_requests(cell(concurrency=16)) == 64
    assert settings.num_warmup(cell(concurrency=16)) == 16


# Servers and load.


def test_stock_has_no_plugin_and_triforce_the_code_it_is_named_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    before = tmp_path / "vllm_triforce"
    before.mkdir()
    (before / "__init__.py").write_text("")
    contests = [OURS, Contest("before", "stock")]
    found = contenders.make(asked(contests=contests, others={"before": str(tmp_path)}))
    assert set(found) == {"stock", "triforce", "before"}
    assert "triforce" not in found["stock"].environment()["VLLM_PLUGINS"].split(",")
    assert "VLLM_PLUGINS" not in found["triforce"].environment()
    assert found["before"].environment()["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert found["triforce"].speculative_config == found["before"].speculative_config
    assert contenders.flags({"a_b": True, "c": False, "d": None, "e": {"f": 1}, "g": 2}) == [
        *("--a-b", "--no-c", "--e", '{"f": 1}', "--g", "2")
    ]


def test_a_server_that_ends_is_reported_with_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "print('no memory'); raise SystemExit(9)"]
    with (
        pytest.raises(server.ServerFailed, match=r"(?s)'stock' ended with code 9.*no memory"),
        server.running("stock", lambda port: command, dict(os.environ), tmp_path / "log"),
    ):
        raise AssertionError("it never answered")


def test_vllms_own_benchmark_understands_the_arguments(tmp_path):
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    one = cell(request_rate=2.5, temperature=0.6)
    found = parser.parse_args(load.bench_arguments(8, one, tmp_path / "p.jsonl", 3, 0.9, 5))
    assert (found.request_rate, found.max_concurrency, found.num_prompts) == (2.5, 2, 3)
    assert found.extra_body == {"max_tokens": 4, "temperature": 0.6, "top_p": 0.9}
    assert found.ignore_eos and found.disable_shuffle
    greedy = parser.parse_args(load.bench_arguments(8, cell(), tmp_path / "p.jsonl", 3, 0.9, 5))
    assert greedy.request_rate == float("inf") and "top_p" not in greedy.extra_body


def test_latencies_are_computed_as_vllm_does():
    found = load.latencies(dict(ttfts=[0.1, 0.3], latencies=[0.5, 0.6], output_lens=[5, 4]))
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(100) and found["p99_ttft_ms"] < 300


def test_a_turn_waits_until_servers_are_at_rest(monkeypatch):
    class Works:
        left = [0.0, 0.5, 0.5, 0.9, 0.9, 0.91]

        def cpu_seconds(self):
            return self.left.pop(0)

    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    server.wait_until_at_rest([Works()])
    assert not Works.left


# The store, figures.


def record(role, speed, *, contest="triforce/stock", pair=0, half=0, cell_index=0, turn=None):
    challenger, baseline = contest.split("/")
    name = baseline if role == "baseline" else challenger
    result = dict(output_throughput=speed, duration=2.0, median_tpot_ms=1000 / speed)
    result |= dict(median_ttft_ms=5.0, p99_tpot_ms=9.0, p99_ttft_ms=9.0, median_e2el_ms=9.0)
    if name == "triforce":
        result["spec_decode_acceptance_length"] = 2.5
    label = {"stock": "stock vLLM", "triforce": "TriForce"}.get(name, name)
    is_second = int(role == "challenger")
    run = dict(contest=contest, half=half, pair=pair, cell_index=cell_index, **cell().to_dict())
    run |= dict(server=name, label=label, role=role, turn=is_second if turn is None else turn)
    run |= dict(requests=4, steps=10 + pair, preemptions=is_second)
    return run | dict(idle_server_cpu_seconds=0.01, result=result)


def test_a_kill_loses_the_run_it_was_at(tmp_path):
    kept = store.Store(tmp_path, {"pairs": 2})
    kept.append([record("baseline", 100)])
    kept.append([record("challenger", 150)])
    kept.append([record("challenger", 150, pair=1, turn=0)])
    path = tmp_path / store.MEASUREMENTS
    path.write_text(path.read_text() + '{"contest": "tri')
    again = store.Store(tmp_path, {"pairs": 2})
    done = {schedule.pair_key(baseline) for baseline, _ in schedule.paired(again.records)}
    assert done == {("triforce/stock", 0, 0, 0)} and len(again.records) == 3
    # The pair is measured anew, in its order; the lonely run does not count.
    again.append([record("challenger", 300, pair=1, turn=0)])
    again.append([record("baseline", 100, pair=1, turn=1)])
    assert len(path.read_text().splitlines()) == 5
    (row,) = summary.summarize(store.Store(tmp_path, {"pairs": 2}).records)
    assert (row["throughput_ratio_min"], row["throughput_ratio_max"]) == (1.5, 3.0)
    with pytest.raises(BadInput, match="pairs 2 there, 3 here"):
        store.Store(tmp_path, {"pairs": 3})


def run_of(speeds, contest="triforce/stock", **more):
    records = []
    for i, (before, after) in enumerate(speeds):
        where = dict(contest=contest, pair=i, half=int(i >= 2), **more)
        records += [record("baseline", before, **where), record("challenger", after, **where)]
    return records


def test_rows_against_figures_computed_by_hand():
    records = run_of([(100, 150), (200, 500), (50, 50)])  # ratios 1.5, 2.5, 1
    records += run_of([(100, 102), (100, 90), (100, 98)], "control/stock")
    records += run_of([(100, 95)], cell_index=1)
    ours, control, uncontrolled = summary.summarize(records)
    assert (ours["throughput_ratio"], ours["throughput_ratio_max"]) == (1.5, 2.5)
    assert ours["throughput_baseline"] == 100 and ours["throughput_challenger"] == 150
    assert ours["tpot_ratio"] == pytest.approx(1 / 1.5) and ours["ttft_ratio"] == 1
    assert (ours["throughput_ratio_half_0"], ours["throughput_ratio_half_1"]) == (2.0, 1.0)
    assert ours["mean_acceptance_length"] == 2.5 and control["mean_acceptance_length"] is None
    assert (ours["steps_baseline"], ours["preemptions_challenger"]) == (11, 1)
    assert "11 / 11" in page.counts(ours, "steps")
    assert ours["idle_server_cpu_share"] == pytest.approx(0.005)
    verdicts = [row["verdict"] for row in (ours, control, uncontrolled)]
    assert verdicts == ["faster", "even", "slower"]


def test_slower_than_the_control_is_slower():
    control = run_of([(100, 96), (100, 103)], "control/stock")
    within, beyond = run_of([(100, 97)]), run_of([(100, 95)])
    assert summary.summarize(within + control)[0]["verdict"] == "even"
    assert summary.summarize(beyond + control)[0]["verdict"] == "slower"


def test_the_page_stands_alone_and_has_the_numbers():
    rows = summary.summarize(run_of([(123.4, 308.5)]) + run_of([(100, 101)], "control/stock"))
    machine = dict(device="a <CPU>", cores="2", vLLM="0", date="today", command="vllm-triforce")
    results = dict(environment=machine, settings=asked().to_dict(), rows=rows)
    results |= dict(checkouts={"triforce": "abc"}, idle_share=0.01)
    text = page.make_page(results).render()
    words = ("123.4", "308.5", "2.50x", "TriForce / stock vLLM", "a &lt;CPU&gt;", "1.01-1.01x")
    stands_alone(text, 4, *words)


# The whole way.


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.thorough
def test_two_servers_are_measured_in_turns(pair, tmp_path):
    given = arguments(pair, "--concurrencies", "2", "--input-lens", "256", "--output-lens", "32")
    given += ["--texts", "mixed", "--pairs", "1", "--requests-per-run", "4", "--warmup", "0"]
    given += ["--contests", "triforce/stock", "--output", str(tmp_path), "--budgets", "128"]
    given += ["--dtypes", "float32"]
    engine = {"enforce_eager": True, "block_size": 32, "distributed_executor_backend": "uni"}
    given += ["--engine", json.dumps(engine)]
    given += ["--triforce", '{"min_context": 0, "adaptive": false}']
    done = subprocess.run(
        [sys.executable, "-m", "vllm_triforce.cli", *given],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in (tmp_path / store.MEASUREMENTS).read_text().splitlines()]
    assert [(run["server"], run["turn"], run["sequence"]) for run in runs] == [
        ("stock", 0, 0),
        ("triforce", 1, 0),
    ]
    for run in runs:
        assert run["result"]["completed"] == 4 and run["result"]["failed"] == 0
        assert run["result"]["total_input_tokens"] == 4 * 256
        assert run["result"]["total_output_tokens"] == 4 * 32
        assert 0 < run["result"]["median_tpot_ms"] < run["result"]["median_ttft_ms"] * 1000
    assert runs[1]["result"]["spec_decode_num_drafts"] > 0
    assert "spec_decode_num_drafts" not in runs[0]["result"]
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["throughput_ratio"] > 0 and row["pairs"] == 1
    assert f"{row['throughput_ratio']:.2f}x" in (tmp_path / "report.html").read_text()
    assert f"{row['throughput_ratio']:.2f}x" in done.stdout
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 2
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "triforce-against-stock-0-stock.log",
        "triforce-against-stock-0-triforce.log",
    }
