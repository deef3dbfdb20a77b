"""Declare the keys of TriForce: one frozen, validated dataclass, free of torch and vLLM."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from vllm_triforce.config.draft_sources import SOURCES, choose_sources, parse_sources
from vllm_triforce.config.resolved import ResolvedConfig, window_tokens
from vllm_triforce.selection import POLICIES


def check_type(config: Any, field: dataclasses.Field) -> None:
    """
    Raises:
        ValueError: it has another.
    """
    value, wanted = getattr(config, field.name), get_args(field.type) or (field.type,)
    if float in wanted:
        wanted += (int,)
    if isinstance(value, bool) != (bool in wanted) or not isinstance(value, wanted):
        raise ValueError(
            f"{field.name}={value!r} must be of type {wanted[0].__name__}, "
            f"not {type(value).__name__}"
        )


def check_range(config: Any, name: str, low: float, high: float | None = None) -> None:
    """None, for a default, is always right.

    Raises:
        ValueError: the value is out of range.
    """
    value = getattr(config, name)
    if value is None:
        return
    if not low <= value < math.inf or (high is not None and value > high):
        bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}")


METHOD = "triforce"

# vLLM's rejection sampler takes at most this many draft tokens per request and
# step (MAX_SPEC_LEN in vllm/v1/sample/rejection_sampler.py).
MAX_NUM_SPECULATIVE_TOKENS = 128

# Which levels take part.
LEVELS = ("1,2,3", "1,3", "2,3", "3")
_PLAIN = "3"
_NEVER = 1 << 31

_MAX_NGRAM = 8
_SEQS, _SEQS_OFFLOADED = 64, 4


@dataclass(frozen=True)
class TriForceConfig:
    """TriForce's keys in ``speculative_config``; each has the unit that is named.

    Raises:
        ValueError: a value is out of range; the message names the value, the
            reason and the remedy.
    """

    num_speculative_tokens: int | None = None
    """Tokens that level 2 hands to the full pass per step (the paper's gamma 2).
    Default: chosen by the controller, at most 32 (12 on Model Runner V2; there with
    ``kv_offload_gib`` 16, and 32 if ``max_num_seqs`` is 16 or less); 6 where it is off."""

    gamma: int | None = None
    """Tokens that level 1 drafts for each pass of level 2 (the paper's gamma 1).
    Default: chosen by the controller, at most 4; 2 where it is off. On Model Runner V2 fixed at
    start: 2 with a draft model, 4 with prompt lookup alone."""

    levels: str = "1,2,3"
    """Levels that take part, for comparisons: ``1,3`` hands level 1's tokens straight to the full
    pass, ``2,3`` has the target draft for itself over its retrieval cache."""

    adaptive: bool = True
    """Whether the controller (``controller/``) chooses what is left open of ``min_context``,
    ``num_speculative_tokens`` and ``gamma``, from measured times and acceptance. A value that is
    given is never changed."""

    adapts: str | None = None
    """Keys that the controller chooses, separated by commas; set by ``with_defaults()``."""

    retrieval_budget: int = 4096
    """Tokens of KV cache that level 2 reads: the first chunk, the retrieved ones and
    the recent ones. Rounded up to what fits vLLM's KV block, which is a retrieval chunk."""

    retrieval_recent_tokens: int | None = None
    """Newest tokens that level 2 keeps whatever their scores. Default: a quarter of
    ``retrieval_budget``, rounded down to whole chunks."""

    selection: str = "retrieval"
    """Selection policy of level 2, by its name in ``selection/``: ``retrieval`` (mean keys),
    ``quest`` (bounds) or ``streaming`` (recent tokens only, for comparisons)."""

    refresh_interval: int = 8
    """Full passes between two selections of chunks."""

    num_sink_tokens: int = 16
    """First tokens of the context that level 1 keeps (StreamingLLM's attention sinks)."""

    num_recent_tokens: int = 240
    """Newest tokens that level 1 keeps when it rebuilds its window."""

    min_context: int | None = None
    """Tokens of context below which a request is not speculated on; 0 is always.
    Default: chosen by the controller; twice ``retrieval_budget`` where it is off."""

    draft_sources: str | None = None
    """Sources of level 1's tokens, separated by commas, the preferred one first, by their names in
    ``runner_v1/sources/``: ``draft_model`` (needs ``model``), ``prompt_lookup``. Of several the
    controller chooses.
    Default: ``draft_model,prompt_lookup`` with a draft model, or the first of them where nothing is
    chosen; ``prompt_lookup`` without."""

    prompt_lookup_max: int | None = None
    """Longest n-gram, in tokens, that prompt lookup looks for. Default: 8."""

    max_speculating_seqs: int | None = None
    """Requests that are speculated on at a time; others decode plainly. Model Runner V2 allocates
    buffers for this number. Default: 64; 4 with ``kv_offload_gib``."""

    kv_offload_gib: float | None = None
    """GiB of host memory for the KV cache, of each rank, on Model Runner V2: the last layers' KV
    lies there, as much as fits."""

    kv_offload_overlap: bool = False
    """Whether a full pass copies a layer from host memory while the one before it runs; that takes
    a second layer's room on the device."""

    log_interval: float = 10.0
    """Seconds between two lines of per-level figures in the log; 0 is never."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_type(self, field)
        check_range(self, "num_speculative_tokens", 1, MAX_NUM_SPECULATIVE_TOKENS)
        check_range(self, "gamma", 1, MAX_NUM_SPECULATIVE_TOKENS)
        check_range(self, "retrieval_budget", 1)
        check_range(self, "retrieval_recent_tokens", 0)
        check_range(self, "refresh_interval", 1)
        check_range(self, "num_sink_tokens", 1)
        check_range(self, "num_recent_tokens", 1)
        check_range(self, "min_context", 0)
        check_range(self, "prompt_lookup_max", 1)
        check_range(self, "max_speculating_seqs", 1)
        check_range(self, "kv_offload_gib", 0.001)
        check_range(self, "log_interval", 0)
        if self.kv_offload_overlap and self.kv_offload_gib is None:
            raise ValueError("kv_offload_overlap=True without kv_offload_gib; set it too")
        if self.draft_sources is not None:
            parse_sources(self.draft_sources)
        if self.levels not in LEVELS:
            raise ValueError(
                f"levels={self.levels!r} is not a set of levels that can run; use one of {LEVELS}"
            )
        if self.selection not in POLICIES.names:
            raise ValueError(
                f"selection={self.selection!r} is not a selection policy; "
                f"use {' or '.join(map(repr, POLICIES.names))}, or install the package that has it "
                "in this environment"
            )
        if (
            self.retrieval_recent_tokens is not None
            and self.retrieval_recent_tokens >= self.retrieval_budget
        ):
            raise ValueError(
                f"retrieval_recent_tokens={self.retrieval_recent_tokens} leaves nothing of "
                f"retrieval_budget={self.retrieval_budget} to retrieve; use a smaller value "
                "or a larger budget"
            )

    @classmethod
    def from_speculative_config(cls, keys: Mapping[str, Any]) -> "TriForceConfig":
        """Reads the keys of a ``speculative_config``; ``method`` and the draft's own are absent.

        Raises:
            ValueError: a key is unknown (the nearest is suggested) or a value is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls) if field.name != "adapts"]
        for key in keys:
            if key == "retrieval_chunk_size":
                raise ValueError(
                    f"speculative_config key {key!r} is gone: retrieval chunks are vLLM's KV "
                    "blocks; set --block-size, or leave it out"
                )
            if key not in known:
                near = difflib.get_close_matches(key, [*known, "model"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {known}"
                raise ValueError(f"speculative_config key {key!r} is unknown to TriForce; {hint}")
        return cls(**keys)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def with_defaults(
        self,
        can_adapt: bool,
        model: str | None = None,
        has_fixed_shapes: bool = False,
        max_num_seqs: int | None = None,
    ) -> "TriForceConfig":
        """Fills in how many tokens are proposed and drafted, from where, and who chooses.

        Args:
            can_adapt: whether the model runner in use has a controller.
            model: the draft model; None for none.
            has_fixed_shapes: whether level 1 drafts as much for every pass of level 2.
            max_num_seqs: vLLM's; None where it is not given.

        Raises:
            ValueError: the sources of drafts that are asked for do not fit these.
        """
        filled = self._with_lengths(can_adapt, has_fixed_shapes, max_num_seqs)
        if filled is self:
            return self
        if self.is_plain:
            check_plain(self, model)
            return filled
        sources = choose_sources(self.draft_sources, model, "gamma" in filled.adaptive_keys)
        if self.prompt_lookup_max is not None and "prompt_lookup" not in sources:
            raise ValueError(
                f"prompt_lookup_max={self.prompt_lookup_max}: level 1 takes its tokens from "
                f"{' and '.join(sources)} here; leave it out, or add 'prompt_lookup' to "
                "draft_sources"
            )
        gamma = filled.gamma
        if (
            has_fixed_shapes
            and "gamma" in filled.adaptive_keys
            and not SOURCES[sources[0]].needs_model
        ):
            gamma = MOST_GAMMA  # drafts are free, and level 2 reads as much for 4 as for 2
        return dataclasses.replace(filled, gamma=gamma, draft_sources=",".join(sources))

    def _with_lengths(self, can_adapt: bool, *more) -> "TriForceConfig":
        if self.adapts is not None:
            return self
        lengths = default_lengths(self, can_adapt, *(more or (False, None)))
        return dataclasses.replace(self, **lengths)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is ever speculated on."""
        return self.levels == _PLAIN

    @property
    def adaptive_keys(self) -> frozenset[str]:
        """What the controller chooses, of ``lengths.CHOICES``."""
        return frozenset(filter(None, (self.adapts or "").split(",")))

    def resolve(self, block_size: int, is_exact: bool = False) -> ResolvedConfig:
        """Fills in what depends on vLLM's KV block, which is a retrieval chunk, and checks that the
        sizes fit it. The budget is rounded up to what fits.

        Args:
            block_size: tokens in one of vLLM's KV blocks.
            is_exact: whether a budget that does not fit is refused instead.

        Raises:
            ValueError: what does not fit, and what would.
        """
        budget = _round_up(self.retrieval_budget, block_size)
        if is_exact and budget != self.retrieval_budget:
            raise ValueError(
                f"retrieval_budget={self.retrieval_budget} must be a multiple of the KV block "
                f"({block_size} tokens); use {budget}"
            )
        recent = self.retrieval_recent_tokens
        if recent is None:
            recent = max(block_size, budget // 4 // block_size * block_size)
        if recent % block_size:
            raise ValueError(
                f"retrieval_recent_tokens={recent} must be a multiple of the KV block "
                f"({block_size} tokens); use {_round_up(recent, block_size)}"
            )
        least = recent + 2 * block_size
        if is_exact and budget < least:
            raise ValueError(
                f"retrieval_budget={self.retrieval_budget} has no room for the first chunk, "
                f"one retrieved chunk and {recent} recent tokens, in chunks of the KV block "
                f"({block_size} tokens); use at least {least}"
            )
        budget = max(budget, least)
        filled = self._with_lengths(can_adapt=False)
        context = _NEVER if self.is_plain else filled.min_context
        if context is None:
            context = 0 if "context" in filled.adaptive_keys else 2 * budget
        values = {
            **dataclasses.asdict(filled),
            "block_size": block_size,
            "retrieval_budget": budget,
            "retrieval_recent_tokens": recent,
            "min_context": context,
            # Chosen by with_defaults(); what is not run has none.
            "draft_sources": filled.draft_sources or "",
            "prompt_lookup_max": filled.prompt_lookup_max or _MAX_NGRAM,
            "max_speculating_seqs": filled.max_speculating_seqs
            or (_SEQS if self.kv_offload_gib is None else _SEQS_OFFLOADED),
        }
        del values["adaptive"]
        return ResolvedConfig(**values)

    @property
    def window_tokens(self) -> int:
        """Tokens of level 1's private cache."""
        filled = self._with_lengths(can_adapt=True)
        assert filled.num_speculative_tokens is not None and filled.gamma is not None
        return window_tokens(
            self.num_sink_tokens,
            self.num_recent_tokens,
            filled.num_speculative_tokens,
            filled.gamma,
        )


def _round_up(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk) * chunk


# What the controller may choose.
CHOICES = ("context", "gamma", "length")

# The paper's gamma 2 and gamma 1, used where nothing is chosen from measurements.
FIXED_LENGTH, FIXED_GAMMA = 6, 2
# Bounds of what the controller chooses. Past 32 tokens an acceptance of 0.97 a token gives less
# than 0.4 of a token for each one more.
_MOST_LENGTH, MOST_GAMMA = 32, 4
# Where every place of a proposal has a distribution on the device, used or not.
_MOST_FIXED_LENGTH = 12
# A full pass over host memory is dear; the paper's settings have 12 to 16. Distributions are there
# for all requests that may run at a time (``max_num_seqs``): for 16 of them, and a vocabulary of
# 128,256, 32 tokens take 0.13 GiB.
_MOST_OFFLOADED_LENGTH, FEW_REQUESTS = 16, 16


def default_lengths(
    asked: "TriForceConfig", can_adapt: bool, has_fixed_shapes: bool, max_num_seqs: int | None
) -> dict[str, Any]:
    """Keys of ``TriForceConfig`` that were left open, and ``adapts``.

    Args:
        can_adapt: whether the model runner in use has a controller.
        has_fixed_shapes: whether level 1 drafts as much for every pass of level 2.
        max_num_seqs: vLLM's; None where it is not given.
    """
    if asked.is_plain:  # vLLM has no speculative method without a token
        return {"num_speculative_tokens": 1, "gamma": 1, "adapts": ""}
    open_ = {
        "context": asked.min_context is None,
        "gamma": asked.gamma is None and asked.levels == "1,2,3",
        "length": asked.num_speculative_tokens is None,
    }
    adapts = [name for name in CHOICES if open_[name]] if asked.adaptive and can_adapt else []
    length, gamma = asked.num_speculative_tokens, asked.gamma
    if length is None:
        most = _MOST_FIXED_LENGTH if has_fixed_shapes else _MOST_LENGTH
        if asked.kv_offload_gib is not None:
            has_few = max_num_seqs is not None and max_num_seqs <= FEW_REQUESTS
            most = _MOST_LENGTH if has_few else _MOST_OFFLOADED_LENGTH
        length = most if "length" in adapts else FIXED_LENGTH
    if gamma is None:
        is_chosen = "gamma" in adapts and not has_fixed_shapes
        gamma = MOST_GAMMA if is_chosen else FIXED_GAMMA
    return {"num_speculative_tokens": length, "gamma": gamma, "adapts": ",".join(adapts)}


def check_plain(asked: "TriForceConfig", model: str | None) -> None:
    """
    Args:
        asked: with levels that decode plainly.
        model: the key ``model``, a draft model.

    Raises:
        ValueError: vLLM does as much by itself, or a key has no use.
    """
    if asked.kv_offload_gib is None:
        raise ValueError(
            f"levels={asked.levels!r} is plain decoding, which vLLM does by itself; set "
            "kv_offload_gib, or drop method='triforce'"
        )
    names = ("num_speculative_tokens", "gamma", "draft_sources", "prompt_lookup_max", "min_context")
    given = {"model": model} | {name: getattr(asked, name) for name in names}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} with levels={asked.levels!r}: nothing is drafted or proposed "
                "then; leave one of them out"
            )
