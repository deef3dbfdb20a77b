"""The sub-command ``bench``: prepare a run, measure, report."""

import argparse
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm_triforce_bench.bench import BadInput, methods
from vllm_triforce_bench.bench.batch import settings as batch_settings
from vllm_triforce_bench.bench.batch.settings import BatchSettings
from vllm_triforce_bench.bench.serve import settings as serve_settings
from vllm_triforce_bench.bench.serve.settings import ServeSettings
from vllm_triforce_bench.bench.settings import EACH, Settings

DIFFERENT, SERVER_FAILED = 1, 3
INTERRUPTED = 130
"""Exit code of a command that a shell interrupts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    batch_settings.add_arguments(parser)
    serve_settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if a greedy output differs from stock vLLM's; 3 if a server failed."""
    folder = Path(args.output)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        serve_settings.refuse_others(args)
        if args.serve:
            return _serve(serve_settings.read(args), folder, args.argv)
        settings = batch_settings.read(args)
        names, left_out = methods.available(settings.methods)
        variants = methods.variants(
            names, settings.budgets, settings.target, settings.draft, settings.method_keys
        )
        from vllm_triforce_bench import preload

        preload.restart_if_needed(args.argv)
        return _decode_batches(settings, variants, left_out, folder, args.argv)
    except BadInput as error:
        args.fail(str(error))
        raise


def _decode_batches(
    settings: BatchSettings,
    variants: list[methods.Variant],
    left_out: dict[str, str],
    folder: Path,
    argv: list[str],
) -> int:
    # All engines in this process; set before vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Errors alone beside the progress bar, of torch's C++ side and of OpenMP, too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KMP_WARNINGS", "0")
    warnings.simplefilter("ignore", FutureWarning)
    from vllm_triforce_bench.bench import model_facts, prompts, report
    from vllm_triforce_bench.bench.batch import grid, page, summary
    from vllm_triforce_bench.bench.store import Store
    from vllm_triforce_bench.console import stdout_console

    console = stdout_console()
    target, draft = model_facts.read_all(
        settings.target, settings.draft, settings.engine_keys, settings.draft_keys
    )
    settings.check_context(target.max_context)
    dtypes = model_facts.served_dtypes(settings.target, settings.dtypes, settings.engine_keys)
    settings = replace(settings, dtypes=dtypes)
    methods.check_copies(variants, dtypes)
    with console.status("reading the prompts"):
        tokenizer = prompts.load_tokenizer(settings.target, settings.engine_keys)
        source = prompts.source(settings, tokenizer, target.max_context)
    if settings.has_own_prompts:
        settings = replace(settings, longest_prompt=len(source.longest_of(EACH)))
    if source.num_left_out:
        left_out[f"{source.num_left_out} of the prompts"] = "too long for the model, or empty"
    for name, reason in left_out.items():
        console.print(f"[yellow]left out: {name} ({reason})")
    keys = [variant.keys for variant in variants]
    arguments = settings.to_dict() | {"variants": keys} | report.machine()
    del arguments["longest_prompt"]  # which follows from the others
    store = Store(folder, arguments)

    from vllm_triforce_bench.bench.batch.engines import fit_at_once, memory_kind
    from vllm_triforce_bench.bench.batch.measure import Measurement

    at_once = store.settle("engines_at_once", lambda: fit_at_once(settings, target, draft))
    groups = grid.groups(variants, at_once)
    sets = grid.paired_sets(settings, len(groups))
    done = set(map(grid.set_of, grid.whole_sets(store.records)))
    todo = [paired for paired in sets if paired not in done]

    def measure(progress) -> None:
        Measurement(settings, groups, store, source, target, draft, progress).run(todo)

    if code := _measure(console, folder, measure, "sets", len(sets), len(sets) - len(todo)):
        return code
    rows = summary.summarize(store.records)
    results = {"left_out": left_out, "memory": memory_kind(), "rows": rows}
    _report(console, folder, argv, settings, results, page, list(map(summary.flat, rows)))
    for text in page.alarms(rows):
        console.print(f"[bold red]{text}")
    return DIFFERENT if page.alarms(rows) else 0


def _serve(settings: ServeSettings, folder: Path, argv: list[str]) -> int:
    models = [settings.target, settings.draft]
    if all(model is None or os.path.isdir(model) for model in models):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm_triforce_bench.bench import model_facts, prompts, report
    from vllm_triforce_bench.bench.serve import contenders, page, requests, schedule, summary
    from vllm_triforce_bench.bench.serve.measure import ServeMeasurement
    from vllm_triforce_bench.bench.store import Store
    from vllm_triforce_bench.console import stdout_console

    console = stdout_console()
    target, _ = model_facts.read_all(
        settings.target, settings.draft, settings.engine_keys, settings.triforce_keys
    )
    settings.check_context(target.max_context)
    (dtype,) = model_facts.served_dtypes(settings.target, [settings.dtype], settings.engine_keys)
    settings = replace(settings, dtype=dtype)
    servers = contenders.make(settings)
    with console.status("reading the prompts"):
        tokenizer = prompts.load_tokenizer(settings.target, settings.engine_keys)
        all_requests = requests.make(settings, tokenizer)
    checkouts = contenders.checkouts(servers)
    phases = schedule.phases(settings.contests, settings.pairs)
    num_pairs = settings.pairs * len(settings.cells) * len(settings.contests)
    arguments = settings.to_dict() | {"checkouts": checkouts, **report.machine()}
    del arguments["run_limit"]  # a run that took too long may be given more
    store = Store(folder.resolve(), arguments)
    done = {schedule.pair_key(baseline) for baseline, _ in schedule.paired(store.records)}

    def measure(progress) -> None:
        measurement = ServeMeasurement(settings, servers, target, all_requests, store, progress)
        measurement.run(phases, done)

    # Ended like interrupted: the servers stop, and the report is written.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = _measure(console, folder, measure, "pairs", num_pairs, len(done))
    finally:
        signal.signal(signal.SIGTERM, previous)
    rows = summary.summarize(store.records)
    if not rows:
        return code
    seconds = sum(record["result"]["duration"] for record in store.records)
    idle_seconds = sum(record["idle_server_cpu_seconds"] for record in store.records)
    results = {"checkouts": checkouts, "idle_share": idle_seconds / seconds, "rows": rows}
    _report(console, folder, argv, settings, results, page, rows)
    return code


def _measure(
    console, folder: Path, measure: Callable, units: str, total: int, num_done: int
) -> int:
    """Measure with a progress bar; returns the exit code.

    Args:
        measure: measures the missing units; takes the progress.
        units: name of the counted units.
    """
    from vllm_triforce_bench.bench.serve.server import ServerFailed
    from vllm_triforce_bench.bench.terminal import UnitProgress

    if num_done:
        console.print(f"{num_done} of {total} {units} are in {folder} already")
    try:
        with UnitProgress(console, total, num_done, units) as progress:
            measure(progress)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from what is in {folder}")
        return INTERRUPTED
    except ServerFailed as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        console.print(f"the same command goes on from what is in {folder}")
        return SERVER_FAILED
    return 0


def _report(
    console,
    folder: Path,
    argv: list[str],
    settings: Settings,
    results: dict,
    page,
    csv_rows: list[dict],
) -> None:
    """Write the files of a run, and print its table.

    Args:
        results: content of results.json beside the environment and the settings.
        page: module of the benchmark's page.
    """
    from vllm_triforce_bench.bench import report

    about = {"environment": report.environment(argv), "settings": settings.to_dict()}
    report.write_reports(folder, about | results, csv_rows, page.make_page(about | results))
    console.print(page.terminal_table(results["rows"]))
    console.print(f"the page: {folder / 'report.html'}", highlight=False)


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt
