"""Writes results.json, results.csv and the page."""

import json

from vllm_triforce_bench.bench import summary
from vllm_triforce_bench.bench.environment import describe
from vllm_triforce_bench.bench.page import render
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.bench.store import Store


def write_reports(
    store: Store,
    settings: Settings,
    left_out: dict[str, str],
    memory_kind: str,
    argv: list[str],
) -> list[dict]:
    """Returns the rows of ``summary.summarize``."""
    rows = summary.summarize(store.records)
    results = {
        "environment": describe(argv),
        "settings": settings.to_dict(),
        "left_out": left_out,
        "memory": memory_kind,
        "rows": rows,
    }
    (store.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    summary.table(rows).to_csv(store.folder / "results.csv", index=False)
    (store.folder / "report.html").write_text(render(results))
    return rows
