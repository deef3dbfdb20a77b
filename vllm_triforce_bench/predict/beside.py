"""What was predicted, beside what was measured."""

from vllm_triforce_bench.predict.geometry import MODELS, draft_of
from vllm_triforce_bench.predict.machine import machine_of
from vllm_triforce_bench.predict.settings import DRAFT, LEVELS, Setting
from vllm_triforce_bench.predict.steps import Predictor

# The defaults that the GPU suite runs with.
_LENGTH, _GAMMA = 6, 2
_PARTS = ("stock_step", "full_pass", "level2_pass", "level1_step", "selection", "verification")


def beside(device: str, cell: dict) -> str:
    """A line for a cell of the GPU suite: of each part the milliseconds predicted, and measured
    over predicted. Empty where the machine or the model is not a named one.

    Args:
        device: its name, as PyTorch has it.
        cell: with ``geometry``, ``budget``, ``cell`` ("CONTEXTxBATCH") and ``costs_ms``.
    """
    machine, model = machine_of(device), MODELS.get(cell["geometry"])
    if machine is None or model is None:
        return ""
    context, batch = map(int, cell["cell"].split("x"))
    setting = Setting(LEVELS, _LENGTH, _GAMMA, cell["budget"], DRAFT)
    costs = Predictor(machine, model, draft_of(model)).costs(setting, context, batch)
    parts = []
    for part in _PARTS:
        predicted, measured = getattr(costs, part), cell["costs_ms"][part]
        parts.append(f"{part} {predicted:.2f} ({measured / predicted:.2f})")
    return "predicted ms (measured/predicted): " + "  ".join(parts)
