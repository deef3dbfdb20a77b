"""The page of predictions with KV in host memory."""

import datetime
from collections.abc import Sequence

from vllm_triforce_bench.predict import offload_text
from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import GIB, Machine
from vllm_triforce_bench.predict.offload_cells import (
    first_batch_beyond,
    offload_cell,
    offload_cells,
    with_memory,
)
from vllm_triforce_bench.predict.others import others_table
from vllm_triforce_bench.predict.settings import Acceptance, Setting

# Of the draft and of prompt lookup by level 2: the paper's raw data, and no level 1 at all.
_POORER = ((0.21, 0.1), (0.0, 0.0))


def offload_page(
    device_gib: float,
    command: str,
    machines: Sequence[Machine],
    models: Sequence[Geometry],
    contexts: Sequence[int],
    batches: Sequence[int],
    acceptances: Sequence[Acceptance],
    among: Sequence[Setting],
    counts: Counts,
) -> str:
    """Markdown.

    Args:
        device_gib: GiB of each device that are used.
        command: as it was given.
        acceptances: that differ in level 2's alone.
    """
    limited = [with_memory(machine, device_gib) for machine in machines]
    draft, lookup = acceptances[0].draft, acceptances[0].lookup
    by_draft = {}
    for level1 in dict.fromkeys([(draft, lookup), *_POORER]):
        its = [Acceptance(acceptance.level2, *level1) for acceptance in acceptances]
        by_draft[level1] = offload_cells(limited, models, contexts, batches, its, among, counts)
    found = by_draft[draft, lookup]
    beyond = [
        offload_cell(
            machine,
            model,
            context,
            first_batch_beyond(machine, model, context),
            acceptances,
            among,
            counts,
        )
        for machine in machines
        if machine.memory_bytes > device_gib * GIB
        for model in models
        for context in contexts
    ]
    today, text = datetime.date.today(), offload_text
    links = ", ".join(f"{m.name} {(m.host_bandwidth or 0) / 1e9:g} GB/s" for m in machines)
    assumed = text.ASSUMED.format(links=links, gib=device_gib, draft=draft, lookup=lookup)
    memory = f"{device_gib:g} GiB of the device's memory"
    parts = [
        f"# Predictions with KV in host memory, {today.day} {today:%B %Y}",
        text.INTRO.format(command=command),
        "## The targets",
        _targets(by_draft),
        f"## With {memory}",
        text.LIMITED,
        _table(found),
        "## With a poorer draft",
        text.DRAFTS,
        _drafts(by_draft),
    ]
    if beyond:
        parts += ["## With all of the device's memory", text.BEYOND, _table(beyond)]
    parts += ["## What others report", text.OTHERS, others_table()]
    return "\n\n".join([*parts, "## What is assumed", assumed])


def _table(cells: Sequence[dict]) -> str:
    heads = next(([b["acceptance"] for b in cell["best"]] for cell in cells if cell["fits"]), [])
    columns = ["machine, model", "context x batch", "layers on the device", "GB a full pass"]
    columns += ["plain, tokens/s", "plain, ms a token", "plain alone, ms a token"]
    columns += [f"TriForce at {head:g}" for head in heads]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        texts = [_name(cell), f"{cell['context']:,} x {cell['batch']}"]
        texts += _row(cell) if cell["fits"] else [f"does not fit: {cell['why']}"]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def _name(cell: dict) -> str:
    return f"{cell['machine']}, {cell['model']}"


def _row(cell: dict) -> list[str]:
    layers = f"{cell['device_layers']} of {cell['layers']}"
    if cell["all_would_fit"]:
        layers += ", and all would fit"
    plain, alone = cell["plain"], cell["plain_alone"]
    return [
        layers,
        f"{cell['crossing_gb']:.1f}",
        f"{plain['tokens_per_second']:.2f}",
        _time(plain),
        f"{_time(alone)}, {alone['device_layers']} layers",
        *(
            f"{_time(b)}: **{b['speedup']:.2f}x**, {b['speedup_over_plain_alone']:.2f}x, "
            f"{b['setting']}"
            for b in cell["best"]
        ),
    ]


def _time(step: dict) -> str:
    return f"{step['ms_per_token']:,.1f} ({step['share_of_limit']:.0%})"


def _targets(by_draft: dict[tuple[float, float], list[dict]]) -> str:
    """For each target, whether predictions reach it."""
    given = [cell for cell in next(iter(by_draft.values())) if cell["fits"]]
    lines = []
    for target in sorted({cell["target"] for cell in given}, reverse=True):
        models = ", ".join(dict.fromkeys(c["model"] for c in given if c["target"] == target))
        lines.append(f"- **{target:g}x for {models}**, by what level 2 accepts of the draft:")
        for (draft, _), cells in by_draft.items():
            its = [cell for cell in cells if cell["fits"] and cell["target"] == target]
            over = [_reached(its, target, key) for key in ("speedup", "speedup_over_plain_alone")]
            lines.append(f"  - {draft:g}: over plain {over[0]}; over plain alone {over[1]}.")
    return "\n".join(lines)


def _reached(cells: Sequence[dict], target: float, key: str) -> str:
    ratios = [(cell, best) for cell in cells for best in cell["best"]]
    short = [
        f"{cell['machine']} at {best['acceptance']:g} ({best[key]:.2f}x)"
        for cell, best in ratios
        if best[key] < target
    ]
    least, most = (of(best[key] for _, best in ratios) for of in (min, max))
    text = f"{least:.2f}x to {most:.2f}x, reached in {len(ratios) - len(short)} of {len(ratios)}"
    return f"{text}, not on {', '.join(short)}" if short else text


def _drafts(by_draft: dict[tuple[float, float], list[dict]]) -> str:
    heads = [f"{draft:g}, {lookup:g}" for draft, lookup in by_draft]
    lines = [f"| machine, model | acceptance | {' | '.join(heads)} |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for row in zip(*by_draft.values()):
        for bests in zip(*(cell["best"] for cell in row if cell["fits"])):
            ratios = " | ".join(f"{best['speedup']:.2f}x {best['setting']}" for best in bests)
            lines.append(f"| {_name(row[0])} | {bests[0]['acceptance']:g} | {ratios} |")
    return "\n".join(lines)
