"""Promise: `vllm-triforce doctor --url` says what a server's counters say, and which key to change.

`tests/engine/test_server.py` asks a real server.
"""

import dataclasses
import json

import prometheus_client
import pytest

from vllm_triforce import cli
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.vllm_patches.carrier import TriForcePrometheus, flatten

LABELS = ["model_name", "engine"]


class Metrics:
    """The metrics of a server with two engines, as vLLM and TriForce export them."""

    def __init__(self, with_triforce: bool = True) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.vllm = {
            name: kind(f"vllm:{name}", name, LABELS, registry=self.registry)
            for kind, names in {
                prometheus_client.Counter: ("generation_tokens", "num_preemptions"),
                prometheus_client.Gauge: ("num_requests_running", "kv_cache_usage_perc"),
                prometheus_client.Histogram: ("request_prompt_tokens",),
            }.items()
            for name in names
        }
        for metric in self.vllm.values():
            for engine in ("0", "1"):
                metric.labels("m", engine)

        def counter(**arguments):
            return prometheus_client.Counter(**arguments, registry=self.registry)

        engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        self.triforce = TriForcePrometheus(counter, LABELS, engines) if with_triforce else None

    def collect(self):
        """Collect as a registry does, and then do what a test has put at ``then``."""
        yield from self.registry.collect()
        self.then()

    def then(self) -> None:
        pass

    def add(self, engine: int, generated: int, prompt: int, counters: LevelCounters) -> None:
        self.vllm["generation_tokens"].labels("m", str(engine)).inc(generated)
        self.vllm["request_prompt_tokens"].labels("m", str(engine)).observe(prompt)
        if self.triforce is not None:
            self.triforce.observe(flatten(counters), engine)


@pytest.fixture
def serve():
    """Return a function that serves ``/metrics`` and returns its address."""
    servers = []

    def start(metrics: Metrics) -> str:
        server, _ = prometheus_client.start_http_server(0, "127.0.0.1", metrics)
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def doctor(capsys, url: str, *more: str) -> tuple[int, str]:
    code = cli.main(["doctor", "--url", url, *more])
    return code, capsys.readouterr().out


def counters(
    accepted=900, rejections=50, level1=(400, 300), proposals=300, direct=75, step_seconds=3.8
) -> LevelCounters:
    drafted, kept = level1
    return LevelCounters(
        num_level1_drafted=drafted,
        num_level1_accepted=kept,
        num_level2_drafted=1200,
        num_level2_accepted=accepted,
        num_level3_steps=proposals,
        num_level3_rejections=rejections,
        num_proposals=proposals,
        num_direct_proposals=direct,
        num_proposed=1200,
        speculative_step_seconds=step_seconds,
        plain_step_seconds=2.0,
        time_seconds={"level 2": 1.5, "verification": 0.5},
    )


def test_figures_are_those_of_all_engines(serve, capsys, tmp_path):
    metrics = Metrics()
    metrics.add(0, 1000, 6000, counters())
    metrics.add(1, 500, 8000, counters(accepted=100, rejections=50))
    metrics.vllm["num_requests_running"].labels("m", "1").set(3)
    metrics.vllm["kv_cache_usage_perc"].labels("m", "0").set(0.25)
    metrics.vllm["kv_cache_usage_perc"].labels("m", "1").set(0.5)
    url = serve(metrics)
    code, shown = doctor(capsys, f"{url}/v1")
    assert code == 0
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines == [
        f"server              {url}, all since its start",
        "",
        "model               m",
        "requests            3 running, 0 waiting; 50% of the KV cache used",
        "prompts             7,000 tokens in the mean",
        "generated           1,500 tokens",
        "speculation         67% of these were proposed and accepted",
        "break-even          speculation has 2.67 tokens a step, and needs 1.90 here to pay",
        "proposals           4.0 tokens each; 25% straight to the full pass",
        "full pass           accepts 0.909 of the tokens it tests (1,000 of 1,100)",
        "level 2             accepts 0.750 of level 1's tokens (600 of 800)",
        "proposing           4.0 s (level 2 3.0, verification 1.0)",
        "advice              nothing to change",
    ]
    _, found = doctor(capsys, url, "--json")
    (model,) = json.loads(found)["models"]
    assert model["levels"]["num_level2_accepted"] == 1000 and model["advice"] == []
    doctor(capsys, url, "--report", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["url"] == "<given>"
    assert report["models"] == [model | {"model": "<model 1>"}]


def test_seconds_compares_two_readings(serve, capsys):
    metrics = Metrics()
    metrics.add(0, 5000, 6000, counters())
    metrics.then = lambda: metrics.add(0, 700, 100, counters(accepted=500))
    _, found = doctor(capsys, serve(metrics), "--seconds", "0.01", "--json")
    results = json.loads(found)
    (model,) = results["models"]
    assert results["seconds"] == 0.01
    assert model["generated_tokens"] == 700 and model["mean_prompt_tokens"] == 100
    assert model["levels"]["num_level2_accepted"] == 500
    assert model["levels"]["break_even_tokens"] == pytest.approx(1.9)


def test_fixed_lengths_have_no_break_even(serve, capsys):
    metrics = Metrics()
    metrics.add(0, 1500, 6000, dataclasses.replace(counters(step_seconds=0), plain_step_seconds=0))
    _, shown = doctor(capsys, serve(metrics))
    assert "has 4.00 tokens a step, and what it needs was not measured" in shown


@pytest.mark.parametrize(
    "generated, prompt, counted, said",
    [
        (300, 6000, counters(), "fewer than 500 tokens were generated"),
        (1500, 6000, counters(rejections=300), "raise retrieval_budget"),
        (1500, 6000, counters(rejections=1000, direct=300), "reject most tokens of level 1"),
        (1500, 6000, counters(level1=(600, 60)), "name a draft model or an EAGLE-3 head"),
        (1500, 6000, counters(proposals=600, step_seconds=5.2), "more time here than its tokens"),
        (300, 6000, LevelCounters(num_nan_requests=2), "nan_requests is above 0"),
        (90_000, 700, counters(), "with prompts of 700 tokens the KV"),
        (90_000, 6000, counters(), "speculation does not pay for this text and batch"),
        (1500, 6000, LevelCounters(num_boundary_faults=1), "boundary_faults is above 0"),
        (1500, 6000, counters(), "lost their KV cache to others 12 times"),
    ],
)
def test_advice(serve, capsys, generated, prompt, counted, said):
    metrics = Metrics()
    metrics.add(0, generated, prompt, counted)
    if "KV cache to others" in said:
        metrics.vllm["num_preemptions"].labels("m", "0").inc(12)
    code, shown = doctor(capsys, serve(metrics))
    assert code == 0 and said in " ".join(shown.split()) and "nothing to change" not in shown


def test_a_server_without_triforce(serve, capsys):
    metrics = Metrics(with_triforce=False)
    metrics.add(0, 1500, 6000, LevelCounters())
    code, shown = doctor(capsys, serve(metrics))
    assert code == 1 and "TriForce does not run here" in shown
    other = prometheus_client.Counter(
        "vllm:spec_decode_num_drafts", "", LABELS, registry=metrics.registry
    )
    other.labels("m", "0").inc()
    code, shown = doctor(capsys, serve(metrics))
    assert code == 1 and "another speculative method runs here" in shown


def test_what_is_no_server_is_said(serve, capsys):
    empty = Metrics(with_triforce=False)
    empty.registry = prometheus_client.CollectorRegistry()
    url = serve(empty)
    for given, says in (
        (["localhost:8000"], "has no http://"),
        (["http://127.0.0.1:9"], "cannot be read ("),
        (["http://127.0.0.1:port"], "cannot be read ("),
        ([url], "has no metrics of vLLM"),
        ([url, "--seconds", "-1"], "--seconds: -1 is not accepted"),
        ([url, "MODEL"], "leave out MODEL"),
        ([url, "--machine", "H200"], "--machine"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--url", *given])
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_server_that_starts_again_between_two_readings(serve, capsys):
    metrics = Metrics()
    metrics.add(0, 5000, 6000, counters())

    def restart():
        metrics.registry = Metrics().registry

    metrics.then = restart
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--url", serve(metrics), "--seconds", "0.01"])
    assert ended.value.code == 2 and "started again" in capsys.readouterr().err
