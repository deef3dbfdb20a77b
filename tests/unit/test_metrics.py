"""Promise: the per-level figures are right, in the log at an interval and from Python."""

import logging
import math
from functools import partial

import prometheus_client
import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_triforce.metrics.counters import COUNTERS, LevelCounters
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.vllm_patches import carrier
from vllm_triforce.vllm_patches.carrier import TriForcePrometheus


def test_rates_and_lengths():
    counters = LevelCounters()
    assert counters.level2_acceptance_rate == 0  # nothing drafted: no division by zero
    counters.add_inner_round([[1, 2], [], [3]], [1, 0, 1])
    counters.add_proposal([[1, 2, 3], [4]])
    counters.add_full_pass(6, 6)
    counters.add_full_pass(6, 2)
    assert counters.level1_acceptance_rate == pytest.approx(2 / 3)
    assert counters.level2_acceptance_rate == pytest.approx(8 / 12)
    assert counters.level2_acceptance_per_test == pytest.approx(8 / 9)
    assert counters.mean_acceptance_length == pytest.approx(5)
    assert (counters.num_proposals, counters.num_proposed) == (2, 4)
    assert counters.break_even_tokens is None
    counters.add_step_seconds(0.5, 0.2)
    assert counters.break_even_tokens == pytest.approx(2.5)


def test_log_line_at_an_interval(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("vllm_triforce.metrics.report.time.monotonic", lambda: now[0])
    logger = logging.getLogger("test")
    caplog.set_level(logging.INFO, logger="test")
    report, counters = IntervalReport(10), LevelCounters()
    counters.add_proposal([[1, 2]])
    counters.add_full_pass(2, 1)
    assert report.due_at == 10
    now[0] = 11
    report.log(counters, logger)
    assert "Level 2: 1 of 2 tokens accepted (50.0%)" in caplog.text
    assert report.due_at == 21
    now[0] = 30  # nothing happened since: no line
    report.log(counters, logger)
    assert len(caplog.records) == 1 and report.due_at == 40
    assert IntervalReport(0).due_at == math.inf


def test_counters_of_several_engines_arrive_once():
    """Each under its engine's label; tests/engine/test_server.py sends them in vLLM's messages."""
    registry = prometheus_client.CollectorRegistry()
    prometheus = TriForcePrometheus(
        partial(prometheus_client.Counter, registry=registry),
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )

    def sent(sender) -> dict[str, int] | None:
        assert sender.attach(EMPTY_MODEL_RUNNER_OUTPUT) is EMPTY_MODEL_RUNNER_OUTPUT
        output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
        return carrier.INCREMENTS.of(sender.attach(output))

    def value(name: str, engine: str, **labels) -> float | None:
        labels |= {"model_name": "m", "engine": engine}
        return registry.get_sample_value(f"vllm:triforce_{name}_total", labels)

    for engine in (0, 1):
        counters = LevelCounters()
        sender = carrier.CounterSender(counters)
        for _ in range(3):
            counters.add_full_pass(6, 4 + engine)
            counters.add_time("level 1", 0.25)
            counters.add_step_seconds(0.5, 0.2)
            prometheus.observe(sent(sender), engine)
        assert sent(sender) is None
    assert not any("triforce" in name for name in vars(EMPTY_MODEL_RUNNER_OUTPUT))
    assert value("level2_accepted_tokens", "0") == 12
    assert value("level2_accepted_tokens", "1") == 15
    assert value("propose_seconds", "0", part="level_1") == pytest.approx(0.75)
    assert value("speculative_step_seconds", "1") == pytest.approx(1.5)
    assert value("level1_draft_tokens", "0") == 0  # there from the start, for rate()


def test_every_counter_has_a_metric():
    assert carrier.flatten(LevelCounters()).keys() == COUNTERS.keys()
