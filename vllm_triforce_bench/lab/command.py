"""The sub-command ``lab`` (docs/lab.md)."""

import argparse
import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.options import checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="causal language model of transformers: folder or hub name")
    parser.add_argument(
        "--text", nargs="+", type=Path, required=True, help="text files that are replayed"
    )
    parser.add_argument("--output", type=Path, default=Path("lab-results"), help="folder")
    for setting in dataclasses.fields(LabSettings):
        if not setting.metadata:
            continue
        kind, help, choices = (setting.metadata[key] for key in ("kind", "help", "choices"))
        keys: dict[str, Any] = {"action": "store_true"}
        if kind is not bool:
            keys = {"type": checked(kind), "default": setting.default}
            keys["nargs"] = "+" if isinstance(setting.default, tuple) else None
            keys["choices"] = choices and tuple(choices)
        parser.add_argument(f"--{setting.name.replace('_', '-')}", help=help, **keys)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; bad input ends in ``args.fail``."""
    from vllm_triforce_bench.console import stdout_console
    from vllm_triforce_bench.lab import report, target
    from vllm_triforce_bench.lab.measure import read_contexts

    try:
        names = [field.name for field in dataclasses.fields(LabSettings)]
        settings = LabSettings(**{name: getattr(args, name) for name in names})
        target.check_device(settings.device)
        config, tokenizer = target.load_config_and_tokenizer(settings)
        contexts = read_contexts(tokenizer, settings)
        settings.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        args.fail(str(error))
    console = stdout_console()
    rows = _measure(target.load_target(settings), contexts, settings)
    frame = report.save_rows(rows, settings.output)
    report.show(frame, console)
    written = report.write(frame, settings, _facts(config), settings.output)
    console.print("Written: " + ", ".join(str(path) for path in written), soft_wrap=True)
    return 0


def _measure(target, contexts: list, settings: LabSettings) -> list[dict]:
    """Measure all rows, and write ``rows.csv`` after each context."""
    from rich.console import Console

    from vllm_triforce_bench.console import Progress
    from vllm_triforce_bench.lab import report
    from vllm_triforce_bench.lab.measure import measure_context

    rows: list[dict] = []
    with Progress(Console(stderr=True)) as progress:
        # A row's work is as the square of its context: most of it is the recording.
        progress.begin(sum(len(each.prompt) ** 2 * len(each.replays) for each in contexts))
        progress.report(f"0 of {len(contexts)} prompts")
        for number, context in enumerate(contexts, 1):
            name = f"stretch {number} of {len(contexts)}, {len(context.prompt)} tokens"
            progress.say(name)
            measured = measure_context(target, context, settings)
            for experiment, part in groupby(measured, lambda row: row["experiment"]):
                for row in part:
                    rows.append(row)
                    progress.done(len(context.prompt) ** 2)
                progress.report(f"{name}, {experiment}: {progress.tasks[0].percentage:.0f}%")
            report.save_rows(rows, settings.output)
    return rows


def _facts(config) -> dict[str, str]:
    import platform

    import torch
    import transformers

    import vllm_triforce

    text = config.get_text_config()
    heads = f"{text.num_attention_heads} query heads"
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return {
        "target": f"{config.model_type}, {text.num_hidden_layers} layers, {heads}, {kv_heads} KV",
        "software": f"vllm-triforce {vllm_triforce.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads of torch",
    }
