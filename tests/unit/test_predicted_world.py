"""Promise: in the world that is predicted for GPUs, the controller steps aside where speculation
does not pay, and speculates where it does.

The simulation is that of ``test_decisions_ahead.py``. What passes take in it is predicted anew for
each batch; what the controller is told of them is what it would measure at start-up.
"""

import pytest

from benchmarks.gpu.models import MODELS, draft_of
from tests.unit.test_decisions_ahead import FIXED, GAMMA, Device, FixedDecisions, decisions
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce_bench.predict.machine import MACHINES
from vllm_triforce_bench.predict.steps import Predictor

BUDGET = 4096
LONGEST = 12
# Where CalibrationV2 measures.
CONTEXTS = (16, 2048, 8192, 32_768, 131_072)
TOGETHER = 32_768
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP = 200


class PredictedCosts:
    """Seconds of passes, as ``Device`` asks for them."""

    def __init__(self, machine: str, model: str) -> None:
        its = MODELS[model]
        self.predictor = Predictor(MACHINES[machine], its, draft_of(its))

    def full_pass(self, tokens, contexts) -> float:
        seconds = self.predictor.full_pass(tokens, contexts)
        if drafts := sum(tokens) - len(tokens):
            seconds += self.predictor.drafts_overhead(1, drafts)
        return seconds

    def level2(self, num_rows: int, num_tokens: int) -> float:
        seconds = self.predictor.level2_pass(num_rows, num_tokens, BUDGET, 1 << 20)
        return seconds + self.predictor.round_overhead(num_rows, num_tokens - 1, True)

    def draft(self, num_rows: int) -> float:
        return self.predictor.draft_pass(num_rows, 1 << 20, 2)

    def measured(self) -> Measurements:
        level2, several = self.level2(1, GAMMA + 1), self.level2(4, GAMMA + 1)
        full = self.predictor.full_pass
        return Measurements(
            [(n, full([1] * n, [CONTEXTS[0]] * n)) for n in ROWS],
            [(q, [(c, full([q], [c])) for c in CONTEXTS]) for q in (1, LONGEST + 1)],
            [(1, level2)],
            (several - level2) / 3,
            self.draft(1),
            (self.draft(4) - self.draft(1)) / 3,
            full_by_num_reqs=[
                (n, *(full([q] * n, [TOGETHER] * n) for q in (1, LONGEST + 1))) for n in (2, 4, 8)
            ],
            full_context=TOGETHER,
        )


def world(machine, model, level2, draft) -> tuple[Device, Measurements]:
    costs = PredictedCosts(machine, model)
    measured = costs.measured()
    overhead = costs.predictor.step_overhead(1)
    device = Device(measured, level2, draft, overhead=overhead, length=10**6)
    device.truth = costs
    return device, measured


def best_fixed(device: Device, size: int, context: int) -> float:
    """They learn nothing, so need no warming up."""
    return max(device.decode(FixedDecisions(*fixed), size, 300, context) for fixed in FIXED)


# Machine, model, context, batch, acceptance of level 2 and of the draft by level 2.
ASIDE = [
    ("H200", "llama-3.1-8b", 8192, 1, 0.85, 0.05),
    ("H200", "llama-3.1-8b", 8192, 8, 0.6, 0.0),
    ("H200", "qwen3-30b-a3b", 8192, 4, 0.8, 0.4),
    ("A100-80GB", "llama-3.1-8b", 122_000, 1, 0.7, 0.4),
    ("RTX-4090", "llama-3.1-8b", 8192, 1, 0.6, 0.1),
]
PAYS = [
    ("H200", "llama-2-7b-128k", 122_000, 1, 0.95, 0.5),
    ("H200", "llama-3.1-8b", 8192, 1, 0.9, 0.7),
    ("H200", "llama-3.1-8b", 122_000, 4, 0.95, 0.6),
    ("H200", "qwen3-8b", 32_000, 8, 0.95, 0.6),
    ("A100-80GB", "llama-2-7b-128k", 32_000, 1, 0.95, 0.5),
]
# A batch's attention is not the sum of its requests': eight fill an A100 that one leaves idle, as
# FlashAttention 2 does not split a longer query's KV.
NOT_ADDITIVE = ("A100-80GB", "llama-3.1-8b", 32_000, 8, 0.95, 0.6)


@pytest.mark.parametrize("machine, model, context, size, level2, draft", ASIDE)
def test_steps_aside(machine, model, context, size, level2, draft):
    device, measured = world(machine, model, level2, draft)
    assert best_fixed(device, size, context) < 1.05, "a cell where next to nothing pays"
    assert device.decode(decisions(measured), size, 800, context, skip=WARM_UP) >= 0.99


@pytest.mark.parametrize(
    "machine, model, context, size, level2, draft, share",
    [(*cell, 0.93) for cell in (*PAYS, NOT_ADDITIVE)],
)
def test_speculates_where_it_pays(machine, model, context, size, level2, draft, share):
    device, measured = world(machine, model, level2, draft)
    best = best_fixed(device, size, context)
    found = device.decode(decisions(measured), size, 800, context, skip=WARM_UP)
    assert best > 1.3 and found >= share * best, (found, best)


def test_what_is_measured_is_what_is_predicted():
    """The controller's cost model, told so, says the same of a single request."""
    costs = PredictedCosts("H200", "llama-3.1-8b")
    model = decisions(costs.measured()).controller.model
    for q, context in ((1, 8192), (13, 32_768), (7, 20_000)):
        expected = costs.predictor.full_pass([q], [context])
        assert model.full_pass([q], [context]) == pytest.approx(expected, rel=0.02)
    assert model.level2(4, GAMMA + 1) == pytest.approx(costs.level2(4, GAMMA + 1))


if __name__ == "__main__":  # prints a table
    for *where, level2, draft in (*ASIDE, *PAYS, NOT_ADDITIVE):
        machine, model, context, size = where
        device, measured = world(machine, model, level2, draft)
        found = device.decode(decisions(measured), size, 1200, context, skip=WARM_UP)
        best, fixed = max(
            (device.decode(FixedDecisions(*fixed), size, 1200, context), str(fixed[0]))
            for fixed in FIXED
        )
        print(f"| {model} on {machine} | {context:,} x {size} | {level2}, {draft} |", end="")
        print(f" {found:.2f} | {best:.2f} ({fixed}) |")
