"""Writes results.json, results.csv and the page."""

import json

from vllm_triforce_bench.bench.environment import describe
from vllm_triforce_bench.bench.serve import summary
from vllm_triforce_bench.bench.serve.page import render
from vllm_triforce_bench.bench.serve.settings import ServeSettings
from vllm_triforce_bench.bench.serve.store import RunStore


def write_reports(
    store: RunStore, settings: ServeSettings, checkouts: dict[str, str], argv: list[str]
) -> list[dict]:
    """Returns the rows of ``summary.summarize``; none and no report where no pair is finished."""
    rows = summary.summarize(store.records)
    if not rows:
        return []
    seconds = sum(record["result"]["duration"] for record in store.records)
    idle = sum(record["idle_server_cpu_seconds"] for record in store.records)
    results = {
        "environment": describe(argv),
        "settings": settings.to_dict(),
        "checkouts": checkouts,
        "idle_share": idle / seconds,
        "rows": rows,
    }
    (store.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    summary.table(rows).to_csv(store.folder / "results.csv", index=False)
    (store.folder / "report.html").write_text(render(results))
    return rows
