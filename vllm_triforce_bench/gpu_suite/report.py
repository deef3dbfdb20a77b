"""From the results of the steps to the figures that are asked for, and to a short log."""

from vllm_triforce_bench.gpu_suite.speedup import Costs, curve, per_test, tokens_per_step
from vllm_triforce_bench.predict.beside import beside

# Per test, of level 2: the paper reports 0.92 (streaming) to 0.97 at 120K.
ACCEPTANCES = [0.7, 0.8, 0.9, 0.92, 0.95, 0.97]
# Of level 1's tokens, by level 2: what the paper's own data say.
PAPER_LEVEL1 = 0.21
GAMMA = 2  # the default, which every step of the suite runs with
TARGETS = {"level2_over_stock_4k": 1.15, "outside_the_levels": 0.05}


def figures(steps: dict) -> dict:
    """Everything derived from ``State.data["steps"]``; what was not measured is not there."""
    done = {n: s["result"] for n, s in steps.items() if n.startswith("bench-") and s.get("result")}
    stock = {r["geometry"]: _having("step_ms", r) for r in done.values() if not r["budget"]}
    pair = list(_having("speedup", steps.get("pair", {}).get("result")).values())
    level1 = _level1_acceptance(pair)
    found: dict = {"level1_acceptance": level1, "cells": [], "pair": [_pair(c) for c in pair]}
    for result in done.values():
        if not result["budget"]:
            continue
        base = stock.get(result["geometry"], {})
        for name, cell in _having("step_ms", result).items():
            if name in base:
                found["cells"].append(_cell(result, name, cell, base, level1))
    if pair:
        best = max(pair, key=lambda c: c["speedup"])["counters"]
        a2 = best["level2_acceptance_per_test"]
        for cell in found["cells"]:
            cell["at_the_pairs_acceptance"] = curve(Costs(**cell["costs_ms"]), [a2], level1)[
                "speedup"
            ]
    return found


def _having(key: str, result: dict | None) -> dict[str, dict]:
    """The items of a result that have it: those of a kind that went well."""
    items = (result or {}).get("items", {})
    return {name: item for name, item in items.items() if key in item}


def _cell(result: dict, name: str, cell: dict, base: dict, level1: float) -> dict:
    costs = Costs(
        stock_step=base[name]["step_ms"],
        selection=cell["selection_ms"],
        level1_step=cell["level1_step_ms"],
        level2_pass=cell["level2_pass_ms"],
        verification=cell["verification_ms"],
        full_pass=cell["full_pass_ms"],
    )
    outside = cell["selection_ms"] + cell["verification_ms"] * cell["rounds_per_step"]
    found = {"geometry": result["geometry"], "budget": result["budget"], "cell": name}
    found |= curve(costs, ACCEPTANCES, level1)
    found["propose_ms"] = cell["propose_ms"]
    found["outside_the_levels"] = outside / cell["step_ms"]
    found["parts_are_synchronized"] = cell["parts_are_synchronized"]
    batch = name.split("x")[1]
    if result["budget"] == 4096 and (near := base.get(f"4096x{batch}")):
        found["level2_over_stock_4k"] = cell["level2_pass_ms"] / near["step_ms"]
    return found


def _pair(cell: dict) -> dict:
    counters = cell["counters"]
    keep = ("context", "batch", "budget", "speedup", "share_of_requests_identical")
    return {key: cell[key] for key in keep} | {
        "mean_acceptance_length": counters["mean_acceptance_length"],
        "level2_acceptance_per_test": counters["level2_acceptance_per_test"],
        "level1_acceptance_rate": counters["level1_acceptance_rate"],
    }


def _level1_acceptance(cells: list[dict]) -> float:
    """Of the trained pair, per test; the paper's where none was measured."""
    drafted = sum(cell["counters"]["num_level1_drafted"] for cell in cells)
    accepted = sum(cell["counters"]["num_level1_accepted"] for cell in cells)
    return per_test(accepted / drafted, GAMMA) if drafted else PAPER_LEVEL1


def log(data: dict, found: dict) -> str:
    """One screen for a reader: steps, targets, cells, the pair."""
    lines = [f"{data.get('machine', {})}", "", "steps"]
    for name, step in data["steps"].items():
        why = step.get("why", "")
        lines.append(f"  {name:32} {step['status']:8} {step['seconds']:6.0f} s  {why}")
        for item, its in ((step.get("result") or {}).get("items") or {}).items():
            if not its.get("ok", "error" not in its):
                lines.append(f"    {item}: {str(its.get('error', its))[:160].splitlines()[0]}")
    lines += _measured(data["steps"])
    lines += ["", "milliseconds a step; speed-up by level 2's acceptance (level 1's: "]
    lines[-1] += f"{found['level1_acceptance']:.2f}); 6 proposed, 0.92 is "
    lines[-1] += f"{tokens_per_step(0.92, 6):.2f} tokens a step"
    head = "stock  full  level2  level1  select verify outside"
    lines.append(f"  {'geometry, budget, context x batch':38} {head}  " + "  ".join(_heads()))
    for cell in found["cells"]:
        c = cell["costs_ms"]
        name = f"{cell['geometry']} {cell['budget']} {cell['cell']}"
        ratios = "  ".join(f"{cell['speedup'][str(a)]:5.2f}" for a in ACCEPTANCES)
        mark = "" if cell["parts_are_synchronized"] else " (parts not synchronised)"
        lines.append(
            f"  {name:38} {c['stock_step']:5.1f} {c['full_pass']:5.1f} {c['level2_pass']:7.2f} "
            f"{c['level1_step']:7.2f} {c['selection']:7.2f} {c['verification']:6.2f} "
            f"{100 * cell['outside_the_levels']:6.1f}%  {ratios}{mark}"
        )
        if predicted := beside(str(data.get("machine", {}).get("device", "")), cell):
            lines.append(f"    {predicted}")
    for cell in found["cells"]:
        if (ratio := cell.get("level2_over_stock_4k")) is not None:
            wanted = TARGETS["level2_over_stock_4k"]
            lines.append(
                f"  level 2 over stock at 4K, {cell['geometry']} {cell['cell']}: {ratio:.2f} "
                f"(wanted: at most {wanted})"
            )
    lines += _offloaded(data["steps"])
    lines += ["", "trained pair"]
    for cell in found["pair"]:
        lines.append(
            f"  {cell['context']}x{cell['batch']} budget {cell['budget']}: {cell['speedup']:.2f}x, "
            f"{cell['mean_acceptance_length']:.2f} tokens a step, level 2 "
            f"{cell['level2_acceptance_per_test']:.3f}, level 1 "
            f"{cell['level1_acceptance_rate']:.3f}, same "
            f"{cell['share_of_requests_identical']:.2f}"
        )
    return "\n".join(lines) + "\n"


def _offloaded(steps: dict) -> list[str]:
    """Decoding over host memory, plainly and with TriForce."""
    results = [
        entry["result"]
        for name, entry in steps.items()
        if name.startswith("offload-") and entry.get("result")
    ]
    lines = ["", "KV in host memory"] if results else []
    for result in results:
        where = f"{result['geometry']} {result['cell']}, {result['device_gib']:g} GiB"
        for name, its in _having("step_ms", result).items():
            facts = its["offload"]
            lines.append(
                f"  {where}, {name}: {its['step_ms']:.1f} ms a step, "
                f"{its['staged_gb_per_step']:.1f} GB staged, "
                f"{its['staged_gb_per_s_of_steps']:.1f} GB/s of it; "
                f"{facts['num_host_layers']} layers in host memory, "
                f"{facts['bytes_per_second'] / 1e9:.1f} GB/s measured at start"
            )
        for name, its in _having("speedup", result).items():
            ratios = ", ".join(f"{x:.2f}x at {a}" for a, x in its["speedup"].items())
            lines.append(f"  {where}, {name} over plain, by level 2's acceptance: {ratios}")
    return lines


def _heads() -> list[str]:
    return [f"{a:5.2f}" for a in ACCEPTANCES]


def _measured(steps: dict) -> list[str]:
    """What TriForce measured passes to take, which it chooses by."""
    lines = ["", "milliseconds of passes, as TriForce measures them at start-up"]
    for step, entry in steps.items():
        for item, its in _having("full_by_tokens", _flat(entry.get("result"))).items():
            full = ", ".join(
                f"{tokens:g} at "
                + " ".join(f"{context:g}: {1e3 * seconds:.2f}" for context, seconds in points)
                for tokens, points in its["full_by_tokens"]
            )
            rows = " ".join(f"{n:g}: {1e3 * seconds:.2f}" for n, seconds in its["full_by_rows"])
            level2 = " ".join(f"{n:g}: {1e3 * s:.2f}" for n, s in its["level2_by_tokens"])
            lines += [
                f"  {step} ({item}), Model Runner {its['runner']}",
                f"    full, tokens at contexts: {full}; requests: {rows}",
                f"    level 2: {level2}, +{1e3 * its['level2_per_row']:.3f} a request; draft: "
                f"{1e3 * its['draft']:.3f}, +{1e3 * its['draft_per_row']:.3f} a request; first "
                f"selection: {1e6 * its['selection_per_token']:.4f} a thousand tokens",
            ]
    return lines


def _flat(result: dict | None) -> dict:
    """A result whose items are what was measured, whether it is all of an item or a part."""
    items = (result or {}).get("items") or {}
    return {"items": {name: item.get("measured", item) for name, item in items.items()}}
