"""Promise: in the world that is predicted for GPUs, the controller steps aside where speculation
does not pay, and speculates where it does.

The simulation is that of ``test_decisions_ahead.py``. What passes take in it is predicted anew for
each batch; what the controller is told of them is what it would measure at start-up.
"""

import pytest

from benchmarks.gpu.models import MODELS, draft_of
from tests.unit.test_decisions_ahead import GAMMA, Device, best_fixed, decisions
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
    """Seconds of passes, in the form of ``CostModel``."""

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
            [(1, [(0, level2)]), (4, [(0, several)])],
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


THOROUGH = pytest.mark.thorough


# Machine, model, context, batch, acceptance of level 2 and of the draft by level 2.
@pytest.mark.parametrize(
    "machine, model, context, size, level2, draft",
    [
        ("H200", "llama-3.1-8b", 8192, 1, 0.85, 0.05),
        ("A100-80GB", "llama-3.1-8b", 122_000, 1, 0.7, 0.4),
        pytest.param("H200", "llama-3.1-8b", 8192, 8, 0.6, 0.0, marks=THOROUGH),
        pytest.param("H200", "qwen3-30b-a3b", 8192, 4, 0.8, 0.4, marks=THOROUGH),
        pytest.param("RTX-4090", "llama-3.1-8b", 8192, 1, 0.6, 0.1, marks=THOROUGH),
    ],
)
def test_steps_aside(machine, model, context, size, level2, draft):
    device, measured = world(machine, model, level2, draft)
    assert best_fixed(device, size, context, num_steps=200) < 1.05, "next to nothing pays"
    assert device.decode(decisions(measured), size, 800, context, skip=WARM_UP) >= 0.99


@pytest.mark.parametrize(
    "machine, model, context, size, level2, draft",
    [
        ("H200", "llama-3.1-8b", 8192, 1, 0.9, 0.7),
        # A batch's attention is not the sum of its requests': eight fill an A100 that one leaves
        # idle, as FlashAttention 2 does not split a longer query's KV.
        ("A100-80GB", "llama-3.1-8b", 32_000, 8, 0.95, 0.6),
        pytest.param("H200", "llama-2-7b-128k", 122_000, 1, 0.95, 0.5, marks=THOROUGH),
        pytest.param("H200", "llama-3.1-8b", 122_000, 4, 0.95, 0.6, marks=THOROUGH),
        pytest.param("H200", "qwen3-8b", 32_000, 8, 0.95, 0.6, marks=THOROUGH),
        pytest.param("A100-80GB", "llama-2-7b-128k", 32_000, 1, 0.95, 0.5, marks=THOROUGH),
    ],
)
def test_speculates_where_it_pays(machine, model, context, size, level2, draft):
    device, measured = world(machine, model, level2, draft)
    best = best_fixed(device, size, context, num_steps=200)
    found = device.decode(decisions(measured), size, 800, context, skip=WARM_UP)
    assert best > 1.3 and found >= 0.93 * best, (found, best)
