"""Promise: the emulated GPU's cases compare what they say, and its graphs replay as CUDA's do."""

import importlib
import sys
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from tests.emulated_gpu.cases import Case, chosen, default_cases, every_case
from tests.emulated_gpu.requests import REQUESTS
from tests.emulated_gpu.verdict import Verdict, distance_where_parted, judge
from tests.models import ROOT


@pytest.fixture(scope="module")
def graphs():
    """The emulation's module of that name; nothing of it is installed."""
    sys.path.insert(0, str(ROOT / "tools" / "gpu_emulation"))
    try:
        yield importlib.import_module("emu.graphs")
    finally:
        sys.path.pop(0)


def captured(graphs, function):
    graph = graphs.Graph()
    with torch.inference_mode(), graphs.capturing(graph):
        assert graphs.is_capturing()
        function()
    assert not graphs.is_capturing()
    return graph


def test_a_replay_reads_and_writes_the_tensors_of_the_capture(graphs):
    source, out = torch.arange(6.0), torch.zeros(3, 2)
    weight = torch.ones(2, 2)
    calls = []

    def a_pass():
        calls.append(1)
        hidden = source.view(3, 2) @ weight + 1
        hidden[1:].mul_(2)
        scratch = torch.empty_like(hidden)
        torch.add(hidden, 1, out=scratch)
        out[:2] = scratch[:2]
        out[2:].copy_(scratch[2:].clone())

    graph = captured(graphs, a_pass)
    for value in (torch.arange(6.0), torch.full((6,), 7.0)):
        source.copy_(value)
        wanted = value.view(3, 2) @ weight + 1
        wanted[1:] *= 2
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, wanted + 1)
    assert len(calls) == 1


def test_a_replay_does_not_see_what_is_made_anew(graphs):
    """A number, and a tensor in the place of one that was there."""
    state = {"tensor": torch.ones(2), "number": 1}
    out = torch.zeros(2)
    graph = captured(graphs, lambda: out.copy_(state["tensor"] * state["number"]))
    state |= {"tensor": torch.full((2,), 5.0), "number": 3}
    graph.replay()
    assert out.tolist() == [1, 1]


def test_what_is_written_in_python_is_recorded_inside(graphs):
    """vLLM's attention finds its metadata in the forward context, where a replay does not look."""
    context = {"scale": torch.ones(1)}
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("triforce_test_scaled(Tensor x, Tensor(a!) out) -> ()")

    def scaled(x, out) -> None:
        out.copy_(x * context["scale"])

    library.impl("triforce_test_scaled", graphs.records_inside(scaled), "CPU")
    x, out = torch.ones(1), torch.zeros(1)
    graph = captured(graphs, lambda: torch.ops.vllm.triforce_test_scaled(x, out))
    context["scale"].fill_(2)
    graph.replay()
    assert out.item() == 2
    context["scale"] = torch.full((1,), 9.0)
    graph.replay()
    assert out.item() == 2


def test_a_kernel_is_launched_again(graphs):
    out, launches = torch.zeros(1), []

    def launch():
        launches.append(1)
        out.add_(1)  # as an interpreted kernel writes: not to be recorded beside it

    graph = captured(graphs, lambda: graphs.perform(launch))
    assert (len(launches), len(graph.launches)) == (1, 1)
    graph.replay()
    assert (len(launches), out.item()) == (2, 2)
    graphs.perform(launch)
    assert (len(launches), len(graph.launches)) == (3, 1)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
    ],
)
def test_a_capture_does_not_wait_for_the_device(graphs, waits):
    with pytest.raises(RuntimeError, match="compute it before the capture"):
        captured(graphs, lambda: waits(torch.ones(3)))
    assert not graphs.is_capturing()


def test_a_capture_within_another_is_refused(graphs):
    with pytest.raises(RuntimeError, match="captured already"):
        captured(graphs, lambda: captured(graphs, lambda: None))


def test_any_two_choices_come_together():
    cases = default_cases()
    assert len(set(cases)) == len(cases) and set(cases) < set(every_case())
    flash = [case for case in cases if case.backend == "FLASH_ATTN" and case.source]
    every = [case for case in every_case() if case.backend == "FLASH_ATTN" and case.source]
    for fields in combinations(("source", "selection", "plan", "graphs"), 2):
        pairs, wanted = (
            {tuple(getattr(case, name) for name in fields) for case in some}
            for some in (flash, every)
        )
        assert pairs == wanted
    triton = {case for case in cases if case.backend == "TRITON_ATTN"}
    for name in ("source", "selection", "plan", "graphs"):
        assert {getattr(case, name) for case in triton} >= {getattr(case, name) for case in every}


def test_what_a_case_is_compared_with_runs_before_it():
    for cases in (default_cases(), every_case(), chosen("*quest-dice-graphs")):
        for place, case in enumerate(cases):
            assert {case.reference, case.eager} <= {*cases[: place + 1]}, case.name
    assert [case.name for case in chosen("FLASH_ATTN-prompt_lookup-quest-dice-graphs")] == [
        "FLASH_ATTN-stock",
        "FLASH_ATTN-prompt_lookup-quest-dice",
        "FLASH_ATTN-prompt_lookup-quest-dice-graphs",
    ]
    with pytest.raises(ValueError, match=r"--only 'XPU\*' fits no case; there are\n  FLASH_ATTN"):
        chosen("XPU*")


class TwoTokens:
    """A target whose best tokens are 1 and, a little behind, 2."""

    def __init__(self, behind: float) -> None:
        self._behind = behind
        self.asked: list[list[int]] = []

    def logits(self, token_ids):
        self.asked.append(token_ids)
        return torch.tensor([0.0, 8.0, 8.0 - self._behind])


def test_a_tie_is_proven_where_requests_part():
    exact = TwoTokens(0.25)
    assert distance_where_parted(REQUESTS[0], [1, 1], [1, 1], exact) is None
    assert distance_where_parted(REQUESTS[0], [1, 1, 0], [1, 2, 2], exact) == 0.25
    assert exact.asked == [[*REQUESTS[0].prompt, 1]]
    assert distance_where_parted(REQUESTS[0], [1, 1], [1, 0], exact) == 8
    assert distance_where_parted(REQUESTS[0], [1, 1], [1], exact) == float("inf")


def test_what_is_wrong_is_said():
    case = Case("FLASH_ATTN", "draft_model", "quest", "dice", graphs=True)
    tokens = [[1] * request.max_tokens(case.num_tokens) for request in REQUESTS]
    counters = dict.fromkeys(
        ("num_level2_drafted", "num_level2_passes", "num_level2_accepted"), 3
    ) | dict(num_level3_rejections=1, num_direct_proposals=1)
    counters |= dict(num_nan_requests=0, num_boundary_faults=0)
    rounds = {
        f"level {which}round, {kind}": 1 for which in ("1 ", "2 ") for kind in ("greedy", "any")
    }
    good = dict(
        token_ids=tokens, not_compiled={}, graphs=[3, 9], counters=counters, replayed_rounds=rounds
    )
    results = {case.reference: good, case.eager: good}

    def faults(behind: float = 0.0, others=results, **changed) -> list[str]:
        verdict = Verdict(case, 1.0, result={**good, **changed})
        judge(verdict, others, TwoTokens(behind))
        return verdict.faults + [round(tie, 4) for tie in verdict.ties]

    assert faults() == []
    parted = [[*row] for row in tokens]
    parted[0][-1] = 2
    assert faults(0.01, token_ids=parted) == [0.01]
    verdict = Verdict(case, 1.0, result={**good, "token_ids": parted})
    judge(verdict, results, TwoTokens(1.0))
    num_greedy = sum(request.is_greedy for request in REQUESTS)
    assert (verdict.num_compared, verdict.num_parted, verdict.ties) == (num_greedy, 1, [])
    assert "'greedy, long'" in faults(1.0, token_ids=parted)[0]
    seeded = next(i for i, request in enumerate(REQUESTS) if "seed" in request.params)
    other = [[*row] for row in tokens]
    other[seeded][3] = 2
    assert "without graphs" in faults(token_ids=other)[0]
    assert "lengths" in faults(token_ids=[[1] * 3, *tokens[1:]])[0]
    assert faults(graphs=[3, 0]) == ["no graph was replayed"]
    no_rounds = {name: n for name, n in rounds.items() if name != "level 2 round, any"}
    assert faults(replayed_rounds=no_rounds) == ["no level 2 round, any was replayed"]
    assert faults(counters=counters | {"num_direct_proposals": 0}) == ["num_direct_proposals is 0"]
    assert faults(counters=counters | {"num_nan_requests": 1}) == ["num_nan_requests is 1"]
    assert "does not compile" in faults(not_compiled={"a_kernel": "why"})[0]
    missing = faults(others={case.reference: good})
    assert missing == [f"{replace(case, graphs=False).name} has no result to compare with"]
