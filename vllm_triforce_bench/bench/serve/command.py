"""``bench --serve``: checks, measuring, reports."""

import argparse
import os
import signal
from dataclasses import replace
from pathlib import Path

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.serve.settings import ServeSettings, read

INTERRUPTED = 130
"""Exit code, as of a command that a shell interrupts."""
SERVER_FAILED = 3


def run(args: argparse.Namespace) -> int:
    """Returns 0, or what went wrong; bad input raises BadInput before any server starts."""
    settings = read(args)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    models = [settings.target, settings.draft]
    if all(model is None or os.path.isdir(model) for model in models):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return _measure_and_report(settings, Path(args.output), args.argv)


def _measure_and_report(settings: ServeSettings, folder: Path, argv: list[str]) -> int:

    from vllm_triforce_bench.bench import model_facts, terminal
    from vllm_triforce_bench.bench.environment import machine
    from vllm_triforce_bench.bench.serve import contenders, requests, schedule
    from vllm_triforce_bench.bench.serve import terminal as serve_terminal
    from vllm_triforce_bench.bench.serve.measure import ServeMeasurement
    from vllm_triforce_bench.bench.serve.report import write_reports
    from vllm_triforce_bench.bench.serve.server import ServerFailed
    from vllm_triforce_bench.bench.serve.store import RunStore
    from vllm_triforce_bench.console import stdout_console

    console = stdout_console()
    trust = bool(settings.engine_keys.get("trust_remote_code", False))
    target = model_facts.read("--target", settings.target, trust)
    if settings.draft:
        model_facts.read("--draft", settings.draft, trust)
    _check_length(settings, target.max_context)
    (dtype,) = model_facts.served_dtypes(settings.target, [settings.dtype], settings.engine_keys)
    settings = replace(settings, dtype=dtype)
    servers = contenders.make(settings)
    with console.status("reading the prompts"):
        from vllm.tokenizers import get_tokenizer

        made = requests.make(settings, get_tokenizer(settings.target, trust_remote_code=trust))
    checkouts = contenders.checkouts(servers)
    phases = schedule.phases(settings.contests, settings.pairs)
    num_pairs = settings.pairs * len(settings.cells) * len(settings.contests)
    asked_for = settings.to_dict() | {"checkouts": checkouts, **machine()}
    del asked_for["run_limit"]  # a run that took too long may be given more
    store = RunStore(folder.resolve(), asked_for)
    done = len(store.done())
    if done:
        console.print(f"{done} of {num_pairs} pairs are in {folder} already")
    ended = 0
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with terminal.Progress(console, num_pairs, done, "pairs") as progress:
            measurement = ServeMeasurement(
                settings, servers, target, made, store, progress.say, progress.advance
            )
            measurement.run(phases)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from what is in {folder}")
        ended = INTERRUPTED
    except ServerFailed as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        console.print(f"the same command goes on from what is in {folder}")
        ended = SERVER_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)
    rows = write_reports(store, settings, checkouts, argv)
    if rows:
        console.print(serve_terminal.table(rows))
        console.print(f"the page: {folder / 'report.html'}", highlight=False)
    return ended


def _check_length(settings: ServeSettings, max_context: int | None) -> None:
    if max_context is not None and settings.max_model_len > max_context:
        raise BadInput(
            f"--input-lens with --output-lens need {settings.max_model_len} positions, room for "
            f"proposals included; {settings.target} has {max_context}: use shorter ones"
        )


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt
