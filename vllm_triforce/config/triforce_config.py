"""What a user can ask of TriForce: one frozen, validated dataclass, free of torch and vLLM."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "triforce"

# vLLM's rejection sampler takes at most this many draft tokens per request and
# step (MAX_SPEC_LEN in vllm/v1/sample/rejection_sampler.py).
MAX_NUM_SPECULATIVE_TOKENS = 128


@dataclass(frozen=True)
class TriForceConfig:
    """TriForce's keys in ``speculative_config``; each has the unit that is named.

    Raises:
        ValueError: a value is out of range; the message names the value, the
            reason and the remedy.
    """

    num_speculative_tokens: int = 6
    """Tokens that level 2 hands to the full pass per step (the paper's gamma 2)."""

    gamma: int = 2
    """Tokens that level 1 drafts for each pass of level 2 (the paper's gamma 1)."""

    retrieval_budget: int = 4096
    """Tokens of KV cache that level 2 reads: the first chunk, the retrieved ones and
    the recent ones. A multiple of ``retrieval_chunk_size``."""

    retrieval_chunk_size: int | None = None
    """Tokens in a retrieval chunk. Default, and so far the only choice: vLLM's KV block."""

    retrieval_recent_tokens: int | None = None
    """Newest tokens that level 2 keeps whatever their scores.
    Default: a quarter of ``retrieval_budget``, rounded down to whole chunks."""

    selection: str = "retrieval"
    """Selection policy of level 2: ``retrieval`` (scores) or ``streaming`` (first
    chunk and recent tokens only, the same budget; for comparisons)."""

    refresh_interval: int = 8
    """Full passes between two selections of chunks."""

    num_sink_tokens: int = 16
    """First tokens of the context that level 1 keeps (StreamingLLM's attention sinks)."""

    num_recent_tokens: int = 240
    """Newest tokens that level 1 keeps when it rebuilds its window."""

    min_context: int | None = None
    """Tokens of context below which a request is not speculated on; 0 is always.
    Default: twice ``retrieval_budget``."""

    prompt_lookup_max: int = 4
    """Longest n-gram, in tokens, that level 1 looks up where there is no draft model."""

    max_speculating_seqs: int = 64
    """On Model Runner V2, requests that are speculated on at a time, and for which buffers are
    allocated; others decode plainly."""

    log_interval: float = 10.0
    """Seconds between two lines of per-level figures in the log; 0 is never."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name)
        self._check_range("num_speculative_tokens", 1, MAX_NUM_SPECULATIVE_TOKENS)
        self._check_range("gamma", 1, MAX_NUM_SPECULATIVE_TOKENS)
        self._check_range("retrieval_budget", 1)
        self._check_range("retrieval_chunk_size", 1)
        self._check_range("retrieval_recent_tokens", 0)
        self._check_range("refresh_interval", 1)
        self._check_range("num_sink_tokens", 1)
        self._check_range("num_recent_tokens", 1)
        self._check_range("min_context", 0)
        self._check_range("prompt_lookup_max", 1)
        self._check_range("max_speculating_seqs", 1)
        self._check_range("log_interval", 0)
        if self.selection not in ("retrieval", "streaming"):
            raise ValueError(
                f"selection={self.selection!r} is not a selection policy; "
                "use 'retrieval' or 'streaming'"
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
            ValueError: a key is unknown (the nearest known one is suggested) or a
                value is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in keys:
            if key not in known:
                near = difflib.get_close_matches(key, [*known, "model"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {known}"
                raise ValueError(f"speculative_config key {key!r} is unknown to TriForce; {hint}")
        return cls(**keys)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def resolve(self, block_size: int) -> "TriForceConfig":
        """Fills in what depends on vLLM's KV block and checks that the sizes fit it.

        Args:
            block_size: tokens in one of vLLM's KV blocks.
        """
        chunk = self.retrieval_chunk_size or block_size
        if chunk != block_size:
            raise ValueError(
                f"retrieval_chunk_size={chunk} differs from vLLM's KV block of {block_size} "
                f"tokens; leave it out, or set --block-size {chunk}"
            )
        if self.retrieval_budget % chunk:
            near = max(1, round(self.retrieval_budget / chunk)) * chunk
            raise ValueError(
                f"retrieval_budget={self.retrieval_budget} must be a multiple of the KV block "
                f"({block_size} tokens); use {near}"
            )
        recent = self.retrieval_recent_tokens
        if recent is None:
            recent = max(chunk, self.retrieval_budget // 4 // chunk * chunk)
        if recent % chunk:
            raise ValueError(
                f"retrieval_recent_tokens={recent} must be a multiple of the KV block "
                f"({block_size} tokens); use {-(-recent // chunk) * chunk}"
            )
        if recent + 2 * chunk > self.retrieval_budget:
            raise ValueError(
                f"retrieval_budget={self.retrieval_budget} has no room for the first chunk, "
                f"one retrieved chunk of {chunk} tokens and {recent} recent tokens; "
                f"use at least {recent + 2 * chunk}"
            )
        context = 2 * self.retrieval_budget if self.min_context is None else self.min_context
        return dataclasses.replace(
            self, retrieval_chunk_size=chunk, retrieval_recent_tokens=recent, min_context=context
        )

    @property
    def window_tokens(self) -> int:
        """Tokens of level 1's private cache: sinks, recent tokens and room to grow before the
        window is rebuilt (half of the recent tokens, so that a rebuild is rare)."""
        growth = max(self.num_recent_tokens // 2, self.num_speculative_tokens + self.gamma + 2)
        return self.num_sink_tokens + self.num_recent_tokens + growth

    def _check_type(self, name: str) -> None:
        value = getattr(self, name)
        default = {f.name: f for f in dataclasses.fields(self)}[name].default
        if value is None and default is None:
            return
        wanted: tuple[type, ...] = (int,)
        if isinstance(default, str):
            wanted = (str,)
        elif isinstance(default, float):
            wanted = (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError(
                f"{name}={value!r} must be of type {wanted[-1].__name__}, "
                f"not {type(value).__name__}"
            )

    def _check_range(self, name: str, low: float, high: float | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")
            raise ValueError(f"{name}={value} is out of range; it must be {bounds}")
