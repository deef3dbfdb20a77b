"""Options and settings of the benchmark: one field for each option."""

import argparse
import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    WrapValidator,
)

from vllm_triforce.config.synthetic import RATES_KEY
from vllm_triforce_bench.bench.methods import METHODS, check_name
from vllm_triforce_bench.options import (
    AboveZero,
    BadInput,
    CommaList,
    NotNegative,
    Share,
    ShareAboveZero,
    Tokens,
    checked,
    split,
)

AUTO = "auto"
"""The dtype in which vLLM serves the model (``model_facts.served_dtypes``)."""
GIB = 1 << 30
WARMUP = -1
"""The repetition that is not measured."""
EACH = 0
"""The context of a dataset's own prompts, each as long as it is."""
# Positions beyond the longest output, for proposals.
PROPOSAL_ROOM = 64
METHOD_OPTIONS = ("triforce", "draft_model", "eagle3", "mtp", "ngram", "suffix")
"""vLLM's names of methods, each with an option for its keys."""
_MIN_REQUESTS = 16
LENGTH_KEY = "synthetic_acceptance_length"
"""vLLM's other key of acceptance at given rates."""
# Engine arguments that the benchmark sets.
_BENCHMARK_KEYS = {
    "host": "servers listen on 127.0.0.1",
    "port": "a free one is taken",
    "served_model_name": "the benchmark names the model",
    "speculative_config": "use --methods, --draft, --budgets and the methods' keys",
    "speculative_model": "use --methods, --draft, --budgets and the methods' keys",
    "dtype": "use --dtypes",
    "seed": "use --seed",
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput("write a JSON object such as '{\"gamma\": 3}'")
    return value


def _without(reasons: dict[str, str], keys: dict[str, Any]) -> dict[str, Any]:
    for key, reason in reasons.items():
        if key in keys:
            raise BadInput(f"key {key!r} is set by the benchmark: {reason}")
    return keys


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise BadInput("there is no such file or folder")
    return path


def _two(rates: list[float]) -> list[float]:
    if len(rates) != 2:
        raise ValueError("give two, of level 1's tokens and of level 2's, such as 0.75,0.95")
    return rates


def _word(word: str, meaning: Any) -> WrapValidator:
    return WrapValidator(lambda value, convert: meaning if value == word else convert(value))


_METHOD_KEYS = dict.fromkeys(
    ("method", "model", "retrieval_budget"), "use --methods, --draft and --budgets"
) | dict.fromkeys(
    (RATES_KEY, LENGTH_KEY, "synthetic_level1_acceptance"), "use --synthetic-acceptances"
)
_Json = Annotated[dict[str, Any], BeforeValidator(_json_object)]
EngineKeys = Annotated[_Json, AfterValidator(partial(_without, _BENCHMARK_KEYS))]
MethodKeys = Annotated[_Json, AfterValidator(partial(_without, _METHOD_KEYS))]
ExistingPath = Annotated[str, AfterValidator(_existing)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Context = Annotated[Tokens, Field(ge=2), _word("each", EACH)]
Budget = Annotated[Tokens, Field(ge=1), _word("default", None)]
"""A ``retrieval_budget``; None for TriForce's default."""
RequestRate = Annotated[AboveZero, _word("inf", None)]
CacheGib = Annotated[float, Field(ge=1 / GIB, lt=1 << 20)]


class Option(NamedTuple):
    """An option of a field.

    Args:
        default: as a user would write it.
        flag: name of the option, if it is not the field's.
        group: title in ``--help`` of this option and those after it.
        serve: True if the option needs ``--serve``, False if it excludes it.
    """

    help: str
    default: Any = None
    flag: str = ""
    group: str = ""
    serve: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked settings; made without loading vLLM or a model."""

    serve: Annotated[
        bool, Option("two vllm serve, loaded in turns", False, group="what is compared")
    ]
    target: Annotated[str, Option("the model, a path or hub name")]
    draft: Annotated[
        str | None,
        BeforeValidator(lambda name: name or None),
        Option("draft model of draft_model and TriForce; none: prompt lookup"),
    ]
    methods: Annotated[
        CommaList[Annotated[str, AfterValidator(check_name)]],
        Option(f"of {', '.join(METHODS)}; default: stock,ngram,triforce; with --serve triforce"),
    ]
    contexts: Annotated[
        CommaList[Context],
        Option(
            "tokens of a prompt; 4K is 4096; each: the prompts of --dataset-name, one by one",
            "1K,4K,16K",
            group="the grid; values with commas between them",
        ),
    ]
    batch_sizes: Annotated[
        CommaList[PositiveInt],
        Option("requests decoded together; with --serve, under way at most", "1"),
    ]
    temperatures: Annotated[
        CommaList[Annotated[NotNegative, Field(le=2)]], Option("0 is greedy", "0")
    ]
    top_p: Annotated[ShareAboveZero, Option("of the sampled ones", 0.9)]
    budgets: Annotated[
        CommaList[Budget | None], Option("TriForce's retrieval_budget, tokens", "default")
    ]
    dtypes: Annotated[CommaList[Dtype], Option("auto (as served), float32, bfloat16, ...", AUTO)]
    tokens: Annotated[int, Field(ge=16), Option("generated by each request", 128)]
    repetitions: Annotated[PositiveInt, Option("each of other prompts", 3)]
    prompts: Annotated[
        ExistingPath | None,
        Option("a text file, or a folder of sources", group="prompts; one of the first two"),
    ]
    dataset_name: Annotated[
        str | None, Option("of vLLM's benchmarks: random, sharegpt, custom, ...")
    ]
    dataset_path: Annotated[str | None, Option("as vllm bench takes it")]
    dataset_args: Annotated[str, Option("more of vllm bench's dataset options, in one string", "")]
    triforce: Annotated[
        MethodKeys, Option("speculative_config keys of TriForce", "{}", group="JSON objects")
    ]
    draft_model: Annotated[MethodKeys, Option("those of stock's draft_model", "{}")]
    eagle3: Annotated[MethodKeys, Option("those of stock's eagle3", "{}")]
    mtp: Annotated[MethodKeys, Option("those of stock's mtp", "{}")]
    ngram: Annotated[MethodKeys, Option("those of stock's ngram", "{}")]
    suffix: Annotated[MethodKeys, Option("those of stock's suffix", "{}")]
    engine_keys: Annotated[
        EngineKeys, Option("engine arguments of every method alike", "{}", flag="--engine")
    ]
    synthetic_acceptances: Annotated[
        Annotated[list[Share], BeforeValidator(split), AfterValidator(_two)] | None,
        Option(
            "accept a token of level 1, and of level 2, at these rates whatever the models say",
            group="the run",
        ),
    ]
    seed: Annotated[int, Option("", 0)]
    kv_cache_gib: Annotated[CacheGib | None, Option("of each engine; default: what cells need")]
    engines_at_once: Annotated[
        PositiveInt | None,
        Option("default: what fits into free memory; 1: one after the other", serve=False),
    ]
    pass_times: Annotated[
        bool,
        Option(
            "on a GPU one more decode, which waits for each part of a proposal", False, serve=False
        ),
    ]
    request_rate: Annotated[
        RequestRate | None,
        Option(
            "requests that come in a second; default: as there is room", group="--serve", serve=True
        ),
    ]
    requests_per_run: Annotated[
        PositiveInt | None, Option("default: four times the batch size, at least 16", serve=True)
    ]
    warmup: Annotated[
        NonNegativeInt | None,
        Option("requests of each cell that are not measured; default: the batch size", serve=True),
    ]
    control: Annotated[
        bool, Option("a second stock server, which costs as much as a method", True, serve=True)
    ]
    longest_prompt: int = 0
    """Tokens of the longest of a dataset's own prompts, once they are read."""

    @property
    def draft_keys(self) -> dict[str, Any]:
        """Keys that pin the draft's revision: TriForce's, else those of ``draft_model``."""
        pinned = {"revision", "code_revision"}
        return next((k for k in (self.triforce, self.draft_model) if pinned & k.keys()), {})

    @property
    def has_own_prompts(self) -> bool:
        """True if prompts are a dataset's own, not stretches of a text."""
        return self.contexts == [EACH]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, and room for proposals."""
        return max(*self.contexts, self.longest_prompt) + self.tokens + PROPOSAL_ROOM

    def num_requests(self, batch_size: int) -> int:
        """Requests of a set: a batch, or a run of the servers."""
        if not self.serve:
            return batch_size
        return self.requests_per_run or max(_MIN_REQUESTS, 4 * batch_size)

    def num_warmup(self, batch_size: int) -> int:
        """Requests of a cell that warm up a server."""
        return batch_size if self.warmup is None else self.warmup

    def prompt_numbers(self) -> dict[tuple[int, int, int, float], range]:
        """Number the servers' prompts by repetition, context, batch size and temperature.

        No cell has a prompt of another, which would be in the prefix cache. All groups share them.
        """
        numbers: dict[tuple[int, int, int, float], range] = {}
        first = 0
        for repetition in (WARMUP, *range(self.repetitions)):
            num_reqs = self.num_warmup if repetition == WARMUP else self.num_requests
            for cell in itertools.product(self.contexts, self.batch_sizes, self.temperatures):
                count = num_reqs(cell[1])
                numbers[repetition, *cell] = range(first, first + count)
                first += count
        return numbers

    @property
    def num_prompts(self) -> int:
        """Different prompts of each context; servers meet no prompt again in another cell."""
        if not self.serve:
            return self.repetitions * max(self.batch_sizes)
        return max(numbers.stop for numbers in self.prompt_numbers().values())

    def check_context(self, max_context: int) -> None:
        """Raise BadInput if a prompt and its output are longer than the model."""
        if self.max_model_len <= max_context:
            return
        if self.has_own_prompts:
            raise BadInput(
                f"--tokens {self.tokens} leaves no room for a prompt: {self.target} has "
                f"{max_context} positions. Lower it"
            )
        raise BadInput(
            f"--contexts {max(self.contexts)} with --tokens {self.tokens} is "
            f"{max(self.contexts) + self.tokens} tokens, and room for proposals; "
            f"{self.target} has {max_context} positions: use contexts up to "
            f"{max_context - self.tokens - PROPOSAL_ROOM}"
        )


_KINDS = get_type_hints(Settings, include_extras=True)
_OPTIONS: dict[str, Option] = {
    name: kind.__metadata__[-1] for name, kind in _KINDS.items() if name != "longest_prompt"
}


def _flag(name: str) -> str:
    return _OPTIONS[name].flag or f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group: Any = parser
    for name, option in _OPTIONS.items():
        if option.group:
            group = parser.add_argument_group(option.group)
        more: dict[str, Any] = {"type": checked(_KINDS[name])}
        if isinstance(option.default, bool):
            more = {"action": argparse.BooleanOptionalAction}
        elif name == "target":
            more["required"] = True
        group.add_argument(
            _flag(name), dest=name, default=option.default, help=option.help or None, **more
        )
    parser.add_argument(
        "--output", default="bench-results", help="folder; goes on where it stopped"
    )


def read(args: argparse.Namespace) -> Settings:
    """Raise BadInput if options exclude each other."""
    for name, option in _OPTIONS.items():
        if option.serve in (None, args.serve) or getattr(args, name) == option.default:
            continue
        if option.serve:
            raise BadInput(f"{_flag(name)} does nothing without --serve; add it, or drop this")
        raise BadInput(f"{_flag(name)} does nothing with --serve; drop one of them")
    args.methods = args.methods or (["triforce"] if args.serve else ["stock", "ngram", "triforce"])
    settings = Settings(**{name: getattr(args, name) for name in _OPTIONS})
    if (settings.prompts is None) == (settings.dataset_name is None):
        raise BadInput("give either --prompts PATH or --dataset-name NAME")
    if settings.contexts.count(EACH) and (not settings.dataset_name or len(settings.contexts) > 1):
        raise BadInput("--contexts each takes the prompts of --dataset-name, and stands alone")
    return settings
