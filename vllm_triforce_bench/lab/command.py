"""The sub-command ``lab`` (docs/lab.md)."""

import argparse
import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from vllm_triforce_bench.lab.copies import SCHEMES
from vllm_triforce_bench.lab.needle import PRESETS, NeedleText
from vllm_triforce_bench.lab.policies import POLICIES
from vllm_triforce_bench.lab.settings import DTYPES, EXPERIMENTS, REPLAYS, LabSettings
from vllm_triforce_bench.options import NotNegative, Share, ShareAboveZero, checked

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(LabSettings)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = _Adder(parser)
    parser.add_argument("model", help="causal language model of transformers: folder or hub name")
    parser.add_argument(
        "--text", nargs="+", type=Path, required=True, help="text files that are replayed"
    )
    parser.add_argument("--output", type=Path, default=Path("lab-results"), help="folder")
    add("experiments", str, "what to vary", choices=EXPERIMENTS)
    add("policies", str, "policies to compare", choices=tuple(POLICIES))
    add("copies", str, "weights of the sparse pass, by each policy", choices=tuple(SCHEMES))
    add("context", PositiveInt, "tokens of context, but for the depth experiment")
    add("contexts", PositiveInt, "tokens of context, in the depth experiment")
    add("budgets", PositiveInt, "tokens that a policy reads, in the budget experiment")
    add("at_budgets", PositiveInt, "tokens that a policy reads, in the other experiments")
    add("chunk_size", PositiveInt, "tokens per retrieval chunk, but for the chunk experiment")
    add("chunk_sizes", PositiveInt, "tokens per retrieval chunk, in the chunk experiment")
    add("recent_tokens", int, "newest tokens that are kept; by default about a quarter")
    add("recent_shares", Share, "shares of the budget for the newest, in the recent experiment")
    add(
        "refresh_interval",
        NonNegativeInt,
        "full passes between two selections, but for that experiment",
    )
    add(
        "refresh_intervals",
        NonNegativeInt,
        "full passes between two selections, in the refresh experiment",
    )
    add("tokens_per_pass", PositiveInt, "tokens that a full pass moves on by")
    add("replay", str, "replay the text's own tokens, or the target's", choices=REPLAYS)
    add("replay_tokens", PositiveInt, "tokens replayed in each stretch")
    add("stretches", PositiveInt, "stretches of text")
    add("temperature", NotNegative, "of the acceptance; 0 is greedy")
    add("top_p", ShareAboveZero, "of the acceptance")
    parser.add_argument(
        "--needle",
        default="pass-key",
        help=f"the planted fact, question and answer: {' or '.join(PRESETS)}",
    )
    for part in ("fact", "question", "answer"):
        parser.add_argument(
            f"--needle-{part}",
            help=f"the needle's {part} in your own words; {{key}} is a random number, {{a}} to "
            "{d} are random names",
        )
    add("needle_depths", Share, "shares of the text before the needle")
    add("needle_repeats", PositiveInt, "needles per depth")
    add("dtype", str, "of weights and cache", choices=DTYPES)
    add("device", str, "of torch")
    add("seed", int, "of the needles' numbers and names")
    add("revision", str, "of the model on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")


class _Adder:
    """Adds options with the names and defaults of the settings."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def __call__(self, name: str, kind: Any, text: str, **keys) -> None:
        default = _DEFAULTS[name]
        if isinstance(default, tuple):
            keys["nargs"] = "+"
        self._parser.add_argument(
            f"--{name.replace('_', '-')}", type=checked(kind), default=default, help=text, **keys
        )


def read_settings(args: argparse.Namespace) -> LabSettings:
    """Raise ValueError if the arguments do not make a run."""
    names = [field.name for field in dataclasses.fields(LabSettings)]
    values = {name: getattr(args, name) for name in names}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return LabSettings(**{**values, "needle": _needle(args)})


def _needle(args: argparse.Namespace) -> NeedleText | None:
    parts = (args.needle_fact, args.needle_question, args.needle_answer)
    if any(parts):
        if not all(parts):
            raise ValueError(
                "a needle of your own needs all of --needle-fact, --needle-question and "
                "--needle-answer"
            )
        return NeedleText(*parts)
    if args.needle not in PRESETS:
        raise ValueError(f"needle {args.needle!r} is unknown; use {' or '.join(PRESETS)}")
    return PRESETS[args.needle]


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; bad input ends in ``args.fail``."""
    from vllm_triforce_bench.console import stdout_console
    from vllm_triforce_bench.lab import report, target
    from vllm_triforce_bench.lab.contexts import Texts

    try:
        settings = read_settings(args)
        target.check_device(settings.device)
        config, tokenizer = target.load_config_and_tokenizer(settings)
        contexts = list(Texts(tokenizer, settings).contexts())
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

    from vllm_triforce_bench.lab import report
    from vllm_triforce_bench.lab.measure import measure_context, query_key_pairs
    from vllm_triforce_bench.progress import Progress

    rows: list[dict] = []
    with Progress(Console(stderr=True)) as progress:
        progress.begin(sum(map(query_key_pairs, contexts)))
        progress.report(f"0 of {len(contexts)} prompts")
        for number, context in enumerate(contexts, 1):
            kind = "stretch" if context.needle_depth is None else "needle"
            name = f"{kind} {number} of {len(contexts)}, {len(context.prompt)} tokens"
            progress.say(name)
            measured = measure_context(target, context, settings, progress.advance)
            for experiment, part in groupby(measured, lambda row: row["experiment"]):
                rows += part
                progress.report(f"{name}, {experiment}: {progress.percentage:.0f}%")
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
