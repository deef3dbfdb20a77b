"""Promise: the benchmark's command runs as it is said, and a user's mistake is said at once."""

import json
import os
import re
import sys

import pytest

from tests import child
from tests.models import PAIR, PROMPTS
from vllm_triforce import cli
from vllm_triforce_bench.bench import measurement


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The command would replace the process to preload libraries."""
    monkeypatch.setenv("VLLM_TRIFORCE_PRELOADED", "1")


def arguments(pair, *more: str) -> list[str]:
    given = ["bench", "--target", pair["target"], "--draft", pair["draft"]]
    given += ["--prompts", str(PROMPTS / "held_out.txt"), "--contexts", "300", "--tokens", "16"]
    return [*given, *more]


# Arguments.


MISTAKES = [
    (["--methods", "stock,eagle"], "--methods: eagle is not accepted: known are stock, draft_m"),
    (["--contexts", "16000000"], "has 65536 positions: use contexts up to"),
    (["--contexts", "4Q"], "--contexts: 4Q is not accepted: write a number of tokens"),
    (["--contexts", "40K", "--prompts", str(PROMPTS / "typing.txt")], "prompts of 40960 need"),
    (["--dtypes", "int8"], "--dtypes: int8 is not accepted: input should be 'auto', 'float32'"),
    (["--triforce", "{gamma: 3}"], "is not JSON"),
    (["--triforce", '{"gama": 3}'], "did you mean 'gamma'"),
    (["--triforce", '{"retrieval_budget": 64}'], "use --methods, --draft and --budgets"),
    (["--methods", "draft_model", "--draft", ""], "needs a draft model"),
    (["--methods", "draft_model", "--draft", str(PAIR / "target")], "by the method 'mtp'"),
    (["--prompts", "/no/such/file"], "there is no such file"),
    (["--prompts", "/dev/null"], "holds no text"),
    (["--target", "./nowhere"], "not a folder with a config.json"),
    (["--tokens", "4"], "--tokens: 4 is not accepted: input should be greater than or equal to 16"),
    (["--temperatures", "nan"], "--temperatures: nan is not accepted: input should be a finite"),
    (["--batch-sizes", "2,1,2"], "--batch-sizes: 2,1,2 is not accepted: name each value once"),
    (["--tokens", "9" * 400], "positions"),
    (["--triforce", '{"max_slowdown": "x"}'], "of type float, not str. Write it as JSON has it"),
    (["--triforce", '{"log_interval": Infinity}'], "log_interval=inf is out of range"),
    (["--dataset-name", "random"], "either --prompts PATH or --dataset-name"),
    (["--contexts", "each"], "takes the prompts of --dataset-name"),
    (["--contexts", "each,4K"], "stands alone"),
    (["--synthetic-acceptances", "0.75"], "0.75 is not accepted: give two, of level 1's tokens"),
    (["--ngram", '{"synthetic_acceptance_rates": [1]}'], "use --synthetic-acceptances"),
    (["--warmup", "3"], "--warmup does nothing without --serve"),
    (["--serve", "--request-rate", "x"], "--request-rate: x is not accepted: input should be a"),
    (["--serve", "--repetitions", "50000"], "different prompts of 300 need"),
    (["--serve", "--pass-times"], "--pass-times does nothing with --serve; drop one of them"),
    (["--engine", '{"port": 1}'], "key 'port' is set by the benchmark: a free one is taken"),
]


@pytest.mark.parametrize("mistake, says", MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_said_before_any_model_loads(
    mistake, says, pair, tmp_path, monkeypatch, capsys
):
    import vllm

    from vllm_triforce_bench.bench import serve

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(vllm.LLM, "__init__", loaded)
    monkeypatch.setattr(serve, "running", loaded)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(pair, "--output", str(tmp_path), "--repetitions", "9", *mistake))
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert re.search(says, found), found


@pytest.mark.parametrize("missing, extra", [("matplotlib", "bench"), ("vllm", "cpu")])
def test_what_is_not_installed_is_named(missing, extra, pair, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_is_installed", lambda module: module != missing)
    with pytest.raises(SystemExit):
        cli.main(arguments(pair))
    assert f"pip install 'vllm-triforce[{extra}]'" in capsys.readouterr().err


def test_help_loads_neither_vllm_nor_the_extra():
    code = (
        "import sys\nfrom vllm_triforce import cli\n"
        "try: cli.main(['bench', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'vllm', 'torch', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    assert "--batch-sizes" in child.run(sys.executable, "-c", code).stdout


# The whole way.


def run_command(given: list[str]) -> str:
    """Run the command in a process of its own; return what it shows."""
    # Without a width, as where a terminal's output is piped.
    others = os.environ.keys() - {"VLLM_TRIFORCE_PRELOADED", "COLUMNS"}
    env = {name: os.environ[name] for name in others}
    return child.run(sys.executable, "-m", "vllm_triforce.cli", *given, env=env).stdout


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    """One run of the command, as a user gives it."""
    folder = tmp_path_factory.mktemp("bench")
    more = ["--methods", "ngram,triforce:all", "--repetitions", "2", "--temperatures", "0,0.6"]
    more += ["--budgets", "128", "--output", str(folder)]
    more += ["--pass-times", "--dtypes", "float32"]
    given = arguments(pair, *more, "--engine", '{"enforce_eager": true, "block_size": 32}')
    return folder, given, run_command(given)


@pytest.mark.engine
def test_a_run_measures_every_method_and_says_that_outputs_are_identical(measured):
    folder, _, shown = measured
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [row["method"] for row in rows] == 2 * ["stock", "ngram", "triforce:all"]
    ours = rows[2]
    assert ours["greedy"] in ("identical", "tie") and ours["ratio"] > 0
    # With all but one of 16 tokens from proposals it cannot be 1; at most 6 and the bonus.
    assert 1 < ours["mean_acceptance_length"] <= 7 and len(ours["acceptance_by_position"]) == 6
    assert ours["time_shares"]["level 2"] > 0 and sum(ours["time_shares"].values()) < 1.01
    assert rows[0]["tokens_per_step"] == 1 and rows[0]["ratio"] == 1
    assert f"{ours['decode_tokens_per_second']:.1f}" in shown
    assert f"{ours['ratio']:.2f}x" in (folder / "report.html").read_text()
    assert len((folder / "results.csv").read_text().splitlines()) == 1 + 6
    records = map(json.loads, (folder / measurement.MEASUREMENTS).read_text().splitlines())
    assert {bool(record.get("parts")) for record in records if record["levels"]} == {True}


@pytest.mark.engine
def test_what_is_measured_is_not_measured_again_and_a_difference_fails(measured, monkeypatch):
    from vllm_triforce_bench.bench import batch

    folder, given, _ = measured
    asked = []
    monkeypatch.setattr(batch.Measurement, "_run", lambda self, sets: asked.extend(sets))
    assert cli.main(given) == 0 and not asked
    path = folder / measurement.MEASUREMENTS
    path.write_text(path.read_text().replace('"identical"', '"different"', 1))
    assert cli.main(given) == 1
    assert "differs from stock" in (folder / "report.html").read_text()
    with pytest.raises(SystemExit):
        cli.main([*given, "--tokens", "17"])
