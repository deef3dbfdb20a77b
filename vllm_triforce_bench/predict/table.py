"""Cells of a prediction, as JSON or as tables of Markdown."""

from collections.abc import Iterable, Sequence

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry, draft_of
from vllm_triforce_bench.predict.machine import Machine
from vllm_triforce_bench.predict.settings import PLAIN, STOCK, Acceptance, Setting
from vllm_triforce_bench.predict.steps import Predictor, Step

# Of a step, what may lie outside the models' passes.
TARGET_OUTSIDE = 0.05


def cells(
    machines: Iterable[Machine],
    models: Iterable[Geometry],
    contexts: Sequence[int],
    batches: Sequence[int],
    acceptances: Sequence[Acceptance],
    among: Sequence[Setting],
    counts: Counts,
) -> list[dict]:
    """One for each machine, model, context and batch, with the best step at each acceptance."""
    models, found = list(models), []
    for machine in machines:
        for model in models:
            predictor = Predictor(machine, model, draft_of(model), counts)
            for context in contexts:
                for batch in batches:
                    place = {"context": context, "batch": batch, "kind": "predicted"}
                    cell = {"machine": machine.name, "model": model.name, **place}
                    found.append(cell | _cell(predictor, context, batch, acceptances, among))
    return found


def _cell(predictor: Predictor, context: int, batch: int, acceptances, among) -> dict:
    if not predictor.fits(context, batch):
        return {"fits": False, "needed_gb": predictor.needed_bytes(context, batch) / 1e9}
    plain = predictor.step(STOCK, context, batch, acceptances[0])
    best = [predictor.best(among, context, batch, acceptance) for acceptance in acceptances]
    return {
        "fits": True,
        "plain_ms": 1e3 * plain.seconds,
        "plain_share_of_limit": plain.share_of_limit,
        "best": [{"acceptance": a.level2, **_step(s)} for a, s in zip(acceptances, best)],
    }


def _step(step: Step) -> dict:
    return {
        "setting": str(step.setting),
        "is_plain": step.setting.route == PLAIN,
        "speedup": step.speedup,
        "tokens": step.tokens,
        "step_ms": 1e3 * step.seconds,
        "share_of_limit": step.share_of_limit,
        "share_outside": step.share_outside,
    }


def markdown(found: Sequence[dict]) -> str:
    """A table for each machine and model."""
    lines: list[str] = []
    for machine, model in dict.fromkeys((cell["machine"], cell["model"]) for cell in found):
        rows = [c for c in found if (c["machine"], c["model"]) == (machine, model)]
        lines += [*_table(machine, model, rows), ""]
    return "\n".join(lines)


def _table(machine: str, model: str, rows: Sequence[dict]) -> list[str]:
    lines = [f"### {model} on {machine}, predicted", ""]
    fitting = [cell for cell in rows if cell["fits"]]
    if fitting:
        heads = [f"{best['acceptance']:g}" for best in fitting[0]["best"]]
        lines.append(f"| context x batch | plain, ms (of limit) | {' | '.join(heads)} |")
        lines.append("|---" * (len(heads) + 2) + "|")
    for cell in fitting:
        texts = " | ".join(_text(best) for best in cell["best"])
        plain = f"{cell['plain_ms']:.1f} ({cell['plain_share_of_limit']:.0%})"
        lines.append(f"| {cell['context']:,} x {cell['batch']} | {plain} | {texts} |")
    left = [c for c in rows if not c["fits"]]
    if left:
        named = ", ".join(
            f"{c['context']:,} x {c['batch']} ({c['needed_gb']:.0f} GB)" for c in left
        )
        lines += ["", f"Does not fit into memory: {named}."]
    return lines


def _text(best: dict) -> str:
    outside = f"{100 * best['share_outside']:.1f} %"
    if best["share_outside"] > TARGET_OUTSIDE:
        outside = f"**{outside}**"
    if best["is_plain"]:
        return f"plain; {outside}"
    return f"{best['speedup']:.2f}x {best['setting']}; {best['share_of_limit']:.0%}; {outside}"
