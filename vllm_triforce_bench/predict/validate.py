"""Sets measured passes beside the predicted ones: ratios, and whether the routes' ranks agree."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry, draft_of
from vllm_triforce_bench.predict.machine import Machine
from vllm_triforce_bench.predict.settings import DRAFT, LEVELS, PLAIN, STOCK, Acceptance, Setting
from vllm_triforce_bench.predict.speedup import Costs, speedup, tokens_per_step
from vllm_triforce_bench.predict.steps import Predictor

# At which the routes are ranked, by measured costs and by predicted ones.
_ACCEPTANCES = (0.6, 0.8, 0.95)
# Speed-ups closer to each other than this have no rank.
_TIE = 1.03


def validation(machine: Machine, counts: Counts, paths: Sequence[Path]) -> str:
    """Markdown: each measured cell of the files beside its prediction, and the ranks.

    Args:
        machine: measured where the passes were; of a cell that has its own, that counts.
        paths: as ``measure.py`` writes them.

    Raises:
        ValueError: a file is not of that kind.
    """
    lines = [
        "Milliseconds: measured, predicted, measured over predicted.",
        "",
        "| model | context x batch | setting | step | full pass and the rest | level 2 | level 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: list[float] = []
    ranks: list[str] = []
    files = [_read(path) for path in paths]
    engine = _engine(machine, counts, next((f["tiny"] for f in files if "tiny" in f), None))
    for found in files:
        grouped: dict[tuple, list[tuple[Setting, dict, Predictor]]] = {}
        for cell in found["cells"]:
            model, setting = Geometry(**cell["model"]), Setting(**cell["setting"])
            predictor = Predictor(_at(cell, machine, engine), model, draft_of(model), counts)
            lines.append(_row(predictor, setting, cell, ratios))
            place = model.name, cell["context"], cell["batch"]
            grouped.setdefault(place, []).append((setting, cell, predictor))
        for place, measured in grouped.items():
            ranks += _ranks(place, measured)
    typical = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    lines += ["", f"Steps, measured over predicted: {typical:.2f} (geometric mean of {len(ratios)}"]
    lines[-1] += f"), {min(ratios):.2f} to {max(ratios):.2f}." if ratios else ")."
    return "\n".join([*lines, "", *(ranks or ["No cell has more than one route to rank."])])


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
        for cell in found["cells"]:
            Geometry(**cell["model"]), Setting(**cell["setting"])
            cell["context"], cell["batch"], cell["step_ms"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no file of measured passes ({type(error).__name__}: {error}); make one with"
            " --measure-passes"
        ) from error
    return found


def _engine(machine: Machine, counts: Counts, tiny: dict | None) -> float:
    """What a step of next to no model takes beyond its prediction: it is the engine's, and is in
    every step. Seconds of a wait, of which each step has one."""
    if tiny is None:
        return 0.0
    predictor = Predictor(_at(tiny, machine), Geometry(**tiny["model"]), counts=counts)
    known = predictor.plain_pass(tiny["context"], 1).seconds + predictor.step_overhead(1)
    return max(0.0, tiny["step_ms"] / 1e3 - known) / max(1.0, counts.step_syncs)


def _at(cell: dict, machine: Machine, engine: float = 0.0) -> Machine:
    """The machine as it was when the cell was measured."""
    found = Machine(**cell["machine"]) if "machine" in cell else machine
    return replace(found, sync_seconds=found.sync_seconds + engine)


def _row(predictor: Predictor, setting: Setting, cell: dict, ratios: list[float]) -> str:
    costs, measured = predictor.costs(setting, cell["context"], cell["batch"]), _measured(cell)
    parts = {"full": costs.stock_step if setting.route == PLAIN else costs.full_pass}
    predicted: float | None = parts["full"]
    if setting.route != PLAIN and cell.get("level1_steps") is not None:
        predicted = (
            costs.full_pass
            + cell["level1_steps"] * costs.level1_step
            + cell["rounds"] * (costs.level2_pass + costs.verification)
            + costs.selection * (setting.route == LEVELS)
        )
    elif setting.route != PLAIN:
        predicted = None  # rounds were not counted
    parts |= {"level 2": costs.level2_pass, "level 1": costs.level1_step}
    texts = [_text(cell["step_ms"], predicted)]
    texts += [_text(measured[part], parts[part]) for part in ("full", "level 2", "level 1")]
    if predicted is not None:
        ratios.append(cell["step_ms"] / predicted)
    place = f"{cell['context']:,} x {cell['batch']}"
    return f"| {cell['model']['name']} | {place} | {setting} | {' | '.join(texts)} |"


def _measured(cell: dict) -> dict[str, float | None]:
    """Milliseconds of single passes; None where they were not seen."""
    spent, rounds = cell.get("parts_ms", {}), cell.get("rounds") or 0
    steps = cell.get("level1_steps") or 0
    return {
        "full": cell["step_ms"] - sum(spent.values()),
        "level 2": spent["level 2"] / rounds if rounds and "level 2" in spent else None,
        "level 1": spent["level 1"] / steps if steps and "level 1" in spent else None,
    }


def _text(measured: float | None, predicted: float | None) -> str:
    if measured is None:
        return ""
    if predicted is None:
        return f"{measured:.1f}"
    return f"{measured:.1f}, {predicted:.1f}: {measured / predicted:.2f}"


def _ranks(place: tuple, measured: Sequence[tuple[Setting, dict, Predictor]]) -> list[str]:
    """A line for each acceptance: the routes by measured costs and by predicted ones."""
    plain = [
        (cell["step_ms"], predictor) for setting, cell, predictor in measured if setting == STOCK
    ]
    usable = [m for m in measured if m[0] == STOCK or m[1].get("level1_steps") is not None]
    if not plain or len(usable) < 2:
        return []
    lines = []
    for level2 in _ACCEPTANCES:
        acceptance = Acceptance(level2)
        both = []
        for setting, cell, predictor in usable:
            if setting == STOCK:
                both.append((str(setting), 1.0, 1.0))
                continue
            predicted = predictor.step(setting, place[1], place[2], acceptance).speedup
            # Stock vLLM's step on the machine as it was when this route was measured.
            then, now = (
                its.costs(STOCK, *place[1:]).stock_step for its in (plain[0][1], predictor)
            )
            found = _speedup(setting, cell, plain[0][0] * now / then, acceptance)
            both.append((str(setting), found, predicted))
        pairs = [(a, b) for a in both for b in both if a[1] > _TIE * b[1]]
        agreed = sum(a[2] > b[2] for a, b in pairs)
        routes = ", ".join(f"{name} {ours:.2f}x, {theirs:.2f}x" for name, ours, theirs in both)
        lines.append(
            f"- {place[0]}, {place[1]:,} x {place[2]}, acceptance {level2:g} (draft "
            f"{acceptance.draft:g}): speed-up from measured costs, predicted: {routes}; "
            f"{agreed} of {len(pairs)} pairs in the same order"
        )
    return lines


def _speedup(setting: Setting, cell: dict, plain_ms: float, acceptance: Acceptance) -> float:
    single, spent = _measured(cell), cell["parts_ms"]
    level1, full = single["level 1"] or 0.0, single["full"] or 0.0
    if setting.route != LEVELS:
        seconds = full + setting.num_tokens * level1
        accepted = acceptance.straight(setting.source or DRAFT)
        return tokens_per_step(accepted, setting.num_tokens) * plain_ms / seconds
    costs = Costs(
        plain_ms,
        spent.get("selection", 0.0),
        level1,
        single["level 2"] or 0.0,
        spent.get("verification", 0.0) / max(1, cell["rounds"]),
        full,
    )
    return speedup(
        costs,
        acceptance.at(setting.budget),
        acceptance.by_level2(setting.source),
        setting.num_tokens,
        setting.gamma,
    )
