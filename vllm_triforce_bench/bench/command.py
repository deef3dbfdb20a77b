"""The sub-command ``bench``: prepare a run, measure, report."""

import argparse
import importlib
import os
import signal
import warnings
from dataclasses import asdict, replace
from pathlib import Path

from vllm_triforce_bench import preload
from vllm_triforce_bench.bench import methods
from vllm_triforce_bench.bench.settings import EACH, METHOD_OPTIONS, Settings, add_arguments, read
from vllm_triforce_bench.options import BadInput

__all__ = ["add_arguments", "run"]

DIFFERENT, SERVER_FAILED = 1, 3
INTERRUPTED = 130
"""Exit code of a command that a shell interrupts."""


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if a greedy output differs from stock vLLM's; 3 if a server failed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        settings = read(args)
        names, left_out = methods.available(settings.methods)
        variants = methods.variants(
            names,
            settings.budgets,
            settings.target,
            settings.draft,
            {name: getattr(settings, name) for name in METHOD_OPTIONS},
            settings.synthetic_acceptances,
        )
        if settings.serve:
            variants += [methods.CONTROL_VARIANT] * settings.control
            if all(os.path.isdir(m) for m in (settings.target, settings.draft) if m):
                os.environ.setdefault("HF_HUB_OFFLINE", "1")
        else:
            # Before vLLM is imported.
            preload.restart_if_needed(args.argv)
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            # Errors alone beside the progress bar, of torch's C++ side and of OpenMP, too.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            os.environ.setdefault("KMP_WARNINGS", "0")
            warnings.simplefilter("ignore", FutureWarning)
        return _compare(settings, variants, left_out, args)
    except BadInput as error:
        args.fail(str(error))
        raise


def _compare(
    settings: Settings, variants: list[methods.Variant], left_out: dict[str, str], args
) -> int:
    from vllm.tokenizers import get_tokenizer

    from vllm_triforce_bench.bench import grid, model_facts, prompts
    from vllm_triforce_bench.bench.measurement import Store
    from vllm_triforce_bench.console import Progress, stdout_console

    console, folder = stdout_console(), Path(args.output)
    target, draft = model_facts.read_all(settings)
    settings.check_context(target.max_model_len)
    settings = replace(settings, dtypes=model_facts.served_dtypes(target, settings.dtypes))
    methods.check_copies(variants, settings.dtypes)
    with console.status("reading the prompts"):
        tokenizer = get_tokenizer(
            target.tokenizer,
            trust_remote_code=target.trust_remote_code,
            revision=target.tokenizer_revision,
        )
        source = prompts.source(settings, tokenizer, target.max_model_len)
    if settings.has_own_prompts:
        settings = replace(settings, longest_prompt=len(source.longest_of(EACH)))
    if source.num_left_out:
        left_out[f"{source.num_left_out} of the prompts"] = "too long for the model, or empty"
    for name, reason in left_out.items():
        console.print(f"[yellow]left out: {name} ({reason})")
    if settings.synthetic_acceptances is not None:
        variants = methods.with_synthetic_test(variants, left_out)
    # Behind the checks, because it loads torch, vLLM and matplotlib.
    from vllm_triforce_bench.bench import report

    keys = [variant.keys for variant in variants]
    arguments = asdict(settings) | {"variants": keys} | report.machine()
    del arguments["longest_prompt"]  # which follows from the others
    store = Store(folder, arguments)

    module = f"vllm_triforce_bench.bench.{'serve' if settings.serve else 'batch'}"
    benchmark, view = map(importlib.import_module, (module, f"{module}_report"))
    at_once = 2  # servers: stock vLLM and another
    if not settings.serve:
        at_once = store.settle(
            "engines_at_once", lambda: benchmark.fit_at_once(settings, target, draft)
        )
    groups = grid.groups(variants, at_once)
    progress = Progress(console)
    measurement = benchmark.Measurement(settings, groups, store, source, target, draft, progress)
    code = _measure(measurement, benchmark.sets(settings, len(groups)))
    if not (rows := view.summarize(store.records)):
        return code
    results = {"environment": report.environment(args.argv), "settings": asdict(settings)}
    results |= {"left_out": left_out, "rows": rows}
    has_alarms = _report(console, folder, view, results)
    return code or (DIFFERENT if has_alarms else 0)


def _measure(measurement, sets: list) -> int:
    """Measure the sets that are missing, with a progress bar; returns the exit code."""
    from vllm_triforce_bench.bench.server import ServerFailed

    console, folder = measurement.progress.console, measurement.store.folder
    # Ended like interrupted: servers stop, and the report is written.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with measurement.progress:
            measurement.run(sets)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from what is in {folder}")
        return INTERRUPTED
    except ServerFailed as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        console.print(f"the same command goes on from what is in {folder}")
        return SERVER_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _report(console, folder: Path, view, results: dict) -> bool:
    """Write the reports and show their table; True if there are alarms."""
    from vllm_triforce_bench.bench import report

    shown = view.make_page(results)
    report.write_reports(folder, results, shown)
    console.print(report.terminal_table(results["rows"], view.line, view.TERMINAL_COLUMNS))
    console.print(f"the page: {folder / 'report.html'}", highlight=False)
    for text in shown.alarms:
        console.print(f"[bold red]{text}")
    return bool(shown.alarms)
