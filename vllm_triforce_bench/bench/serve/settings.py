"""What was asked for: one checked dataclass, made without loading vLLM or a model."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.serve import cells
from vllm_triforce_bench.bench.serve.arguments import refuse_others
from vllm_triforce_bench.bench.serve.cells import Cell
from vllm_triforce_bench.bench.serve.schedule import Contest
from vllm_triforce_bench.bench.settings import (
    DTYPES,
    json_object,
    keys_of_method,
    list_of,
    num_tokens,
)

STOCK, CONTROL, TRIFORCE = "stock", "control", "triforce"
_LEAST_REQUESTS = 16
# Engine arguments that the benchmark sets itself.
_OWN_ENGINE_KEYS = {
    "host": "servers listen on 127.0.0.1",
    "port": "a free one is taken",
    "speculative_config": "use --draft, --budgets and --triforce",
    "speculative_model": "use --draft, --budgets and --triforce",
    "served_model_name": "the benchmark names the model",
    "max_model_len": "it follows from --input-lens and --output-lens",
    "max_num_seqs": "use --max-num-seqs",
    "kv_cache_memory_bytes": "use --kv-cache-gib",
    "dtype": "use --dtypes",
    "seed": "use --seed",
}


@dataclass(frozen=True)
class ServeSettings:
    """What is measured through servers, validated."""

    target: str
    draft: str | None
    prompts: str | None
    cells: list[Cell]
    """In the order in which they run."""
    pairs: int
    requests_per_run: int | None
    warmup: int | None
    contests: list[Contest]
    others: dict[str, str]
    """Folders of other checkouts of this package, by the name of their server."""
    budget: int
    dtype: str
    top_p: float
    seed: int
    triforce_keys: dict[str, Any]
    engine_keys: dict[str, Any]
    kv_cache_gib: float | None
    max_num_seqs: int
    run_limit: int

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt, its output and what is proposed beyond it."""
        return max(cell.input_len + cell.output_len for cell in self.cells) + 64

    def num_requests(self, cell: Cell) -> int:
        """Of a run."""
        return self.requests_per_run or max(_LEAST_REQUESTS, 4 * cell.concurrency)

    def num_warmup(self, cell: Cell) -> int:
        return cell.concurrency if self.warmup is None else self.warmup

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(args: argparse.Namespace) -> ServeSettings:
    """Raises BadInput: an argument is out of range, or the arguments do not go together."""
    refuse_others(args)
    sequence = _cells(args)
    others = _others(args.other)
    settings = ServeSettings(
        target=args.target,
        draft=args.draft or None,
        prompts=args.prompts,
        cells=sequence,
        pairs=args.pairs,
        requests_per_run=args.requests_per_run,
        warmup=args.warmup,
        contests=_contests(args, others),
        others=others,
        budget=_one("--budgets", list_of("--budgets", args.budgets, num_tokens)),
        dtype=_one("--dtypes", list_of("--dtypes", args.dtypes, str)),
        top_p=args.top_p,
        seed=args.seed,
        triforce_keys=keys_of_method("--triforce", args.triforce),
        engine_keys=json_object("--engine", args.engine),
        kv_cache_gib=args.kv_cache_gib,
        max_num_seqs=(
            max(cell.concurrency for cell in sequence)
            if args.max_num_seqs is None
            else args.max_num_seqs
        ),
        run_limit=args.run_limit,
    )
    _check(settings)
    return settings


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.sequence is not None:
        return cells.from_file(Path(args.sequence))
    return cells.grid(
        list_of("--texts", args.texts, str),
        list_of("--input-lens", args.input_lens, num_tokens),
        list_of("--output-lens", args.output_lens, num_tokens),
        list_of("--request-rates", args.request_rates, cells.rate_of),
        list_of("--concurrencies", args.concurrencies, int),
        list_of("--temperatures", args.temperatures, float),
    )


def _others(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path or set(name) & set("/, "):
            raise BadInput(f"--other {text!r}: write NAME=PATH, without / , or space in NAME")
        if name in (STOCK, CONTROL, TRIFORCE) or name in found:
            raise BadInput(f"--other {text!r}: the name {name!r} is taken; choose another")
        folder = Path(path).expanduser().resolve()
        if not (folder / "vllm_triforce" / "__init__.py").is_file():
            raise BadInput(
                f"--other {text!r}: {folder} holds no package vllm_triforce; name the root of a "
                "checkout"
            )
        found[name] = str(folder)
    return found


def _contests(args: argparse.Namespace, others: dict[str, str]) -> list[Contest]:
    if args.contests is None:
        challengers = [TRIFORCE, *([CONTROL] if args.control else []), *others]
        return [Contest(name, STOCK) for name in challengers]
    names = [STOCK, CONTROL, TRIFORCE, *others]
    found = []
    for text in list_of("--contests", args.contests, str):
        challenger, _, baseline = text.partition("/")
        for name in (challenger, baseline):
            if name not in names:
                raise BadInput(
                    f"--contests {text!r}: {name!r} is unknown; write CHALLENGER/BASELINE, of "
                    f"{', '.join(names)}"
                )
        contest = Contest(challenger, baseline)
        if challenger == baseline or contest in found:
            raise BadInput(
                f"--contests {text!r}: name each contest once, of two servers; a second stock "
                "server is control"
            )
        found.append(contest)
    return found


def _one(option: str, values: list):
    if len(values) > 1:
        raise BadInput(f"{option}: one value with --serve, not {len(values)}; run once for each")
    return values[0]


def _check(settings: ServeSettings) -> None:
    for option, value, low in (
        ("--pairs", settings.pairs, 1),
        ("--requests-per-run", settings.requests_per_run, 1),
        ("--warmup", settings.warmup, 0),
        ("--max-num-seqs", settings.max_num_seqs, 1),
        ("--budgets", settings.budget, 1),
        ("--run-limit", settings.run_limit, 1),
    ):
        if value is not None and value < low:
            raise BadInput(f"{option}: {value} is out of range; it must be at least {low}")
    if not 0 < settings.top_p <= 1:
        raise BadInput(f"--top-p {settings.top_p} is out of range; it must be in (0, 1]")
    if settings.kv_cache_gib is not None and not settings.kv_cache_gib > 0:
        raise BadInput(f"--kv-cache-gib {settings.kv_cache_gib} must be more than 0")
    if settings.dtype not in DTYPES:
        raise BadInput(f"--dtypes: {settings.dtype!r} is unknown; known: {', '.join(DTYPES)}")
    for key, reason in _OWN_ENGINE_KEYS.items():
        if key in settings.engine_keys:
            raise BadInput(f"key {key!r} in --engine is set by the benchmark: {reason}")
    if settings.prompts is None:
        if needing := [cell.text for cell in settings.cells if cell.needs_prompts]:
            raise BadInput(
                f"text {needing[0]!r} is cut from a file; give --prompts FILE, or --texts random"
            )
    elif not Path(settings.prompts).exists():
        raise BadInput(f"--prompts {settings.prompts}: there is no such file or folder")
