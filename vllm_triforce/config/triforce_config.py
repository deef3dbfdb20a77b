"""Config as given by the user, with checks of the keys, and config of a running engine."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_triforce.config.budget import CONTEXT_SHARE, RetrievalBudget, fit_budget, round_up
from vllm_triforce.config.draft_sources import HEAD_SOURCE, SOURCES, choose_sources, parse_sources
from vllm_triforce.config.keys import (
    FIXED_GAMMA,
    FIXED_LENGTH,
    KEYS,
    LEVEL_SETS,
    METHOD,
    Keys,
    check_key,
)
from vllm_triforce.selection import POLICIES

# Bounds of the controller's choices. Past 32 tokens, an acceptance of 0.97 a token adds less than
# 0.4 of a token for each one more.
_MAX_LENGTH, _MAX_GAMMA = 32, 4
# With a head on Model Runner V2. Predicted by a roofline of an H200, not measured: 3 to 9 % faster
# than 2 where level 2 accepts 0.6 or 0.75 of a head's tokens, 1 to 2 % slower at 0.3.
_HEAD_GAMMA = 3
# On Model Runner V2 each token of a proposal has a distribution on the device, used or not.
_MAX_FIXED_SHAPE_LENGTH = 12
# A full pass over host memory is slow, so longer proposals pay; the paper uses 12 to 16. Memory for
# distributions grows with max_num_seqs: 16 requests with 32 tokens take 0.13 GiB at a vocabulary of
# 128,256.
_MAX_OFFLOAD_LENGTH, _FEW_REQUESTS = 16, 16
# Tokens of a proposal, and requests that speculate, if layers keep a state for each token.
# Qwen3.8-27B has 150 MB of states a request and token, vLLM's for each token of a proposal and
# level 2's for each of a pass.
_MAX_STATES, _MAX_SEQS_STATES = 4, 8

_MAX_NGRAM, _NUM_SINKS = 8, 16
_MAX_SEQS, _MAX_SEQS_OFFLOAD = 64, 4
_NEVER = (1 << 31) - 1
_MAX_SLOWDOWN = 0.05

# Limits of the retrieval budget where it is a share of the context, and recent tokens of any.
_MIN_BUDGET, _MAX_BUDGET, _MAX_RECENT = 512, 4096, 128

# Keys of level 1's drafts whose default shows that they are not given.
LEVEL1_KEYS: tuple[str, ...] = ("gamma", "draft_sources", "prompt_lookup_max", "num_sink_tokens")
LEVEL1_KEYS += ("synthetic_level1_acceptance",)

# Policies that have kernels for selection inside Runner V2's passes (kernels/pass_selection.py).
_PASS_KERNELS = ("retrieval",)

# Keys of earlier versions: why each is gone, and what to do.
_GONE_KEYS = {
    "retrieval_chunk_size": "retrieval chunks are vLLM's KV blocks. Set --block-size, or leave it "
    "out.",
    "refresh_interval": "each layer selects inside level 2's passes. Leave it out.",
}


@dataclass(frozen=True)
class ResolvedConfig(Keys):
    """Result of ``TriForceConfig.resolve()``; goes to the workers as a dict."""

    block_size: int = dataclasses.field(kw_only=True)
    """Tokens in a retrieval chunk: one of vLLM's KV blocks, on a GPU also a part of a large one."""
    min_retrieval_budget: int = dataclasses.field(kw_only=True)
    """``retrieval_budget`` is the budget of the longest contexts, this that of the shortest."""

    @property
    def uses_level2(self) -> bool:
        return "2" in self.levels.split(",")

    @property
    def max_batch(self) -> int:
        """Maximum requests of a step with speculation, on Runner V2.

        Larger batches are bound by arithmetic.
        """
        return max(256, 4 * self.max_speculating_seqs)

    @property
    def policy(self) -> str:
        """Selection policy; without level 2 one that keeps no summaries."""
        return self.selection if self.uses_level2 else "streaming"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(filter(None, self.draft_sources.split(",")))

    @property
    def has_head(self) -> bool:
        """True if the draft is an EAGLE-3 head or an MTP layer."""
        return HEAD_SOURCE in self.sources

    @property
    def state_capacity(self) -> int:
        """Positions whose hidden states are kept for a head: its window and a proposal."""
        return self.window_tokens + self.num_speculative_tokens + 1

    @property
    def budget(self) -> RetrievalBudget:
        return RetrievalBudget(
            self.min_retrieval_budget // self.block_size,
            self.retrieval_budget // self.block_size,
            self.retrieval_recent_tokens // self.block_size,
        )

    def budget_of(self, context: int) -> int:
        """Return the tokens that level 2 reads of a context of ``context`` tokens."""
        return self.budget.of(context // self.block_size) * self.block_size

    @property
    def budget_text(self) -> str:
        min_tokens, max_tokens = self.min_retrieval_budget, self.retrieval_budget
        if min_tokens == max_tokens:
            return f"{max_tokens:,} tokens"
        return f"1/{CONTEXT_SHARE} of the context, {min_tokens:,} to {max_tokens:,} tokens,"

    @property
    def max_selected_blocks(self) -> int:
        """Maximum blocks of a request and KV head that level 2 reads before the recent ones."""
        return self.budget.max_blocks - self.budget.recent

    @property
    def calibration_context(self) -> int:
        """Tokens of context of the proposals that are measured at start-up.

        Twice a fixed budget; where it is a share, the context whose budget is twice the least.
        """
        if self.min_retrieval_budget == self.retrieval_budget:
            return 2 * self.retrieval_budget
        return 2 * CONTEXT_SHARE * self.min_retrieval_budget

    @property
    def has_selection_kernels(self) -> bool:
        """True if Runner V2 has kernels for the policy."""
        return self.policy in _PASS_KERNELS

    @property
    def max_growth(self) -> int:
        """Maximum tokens by which a context grows from proposal to proposal."""
        return self.num_speculative_tokens + 1

    @property
    def table_width(self) -> int:
        """Maximum blocks that level 2 reads of a request: the budget and the growth after it."""
        growth = 3 * self.max_growth + self.gamma
        return self.budget.max_blocks + -(-growth // self.block_size) + 2


@dataclass(frozen=True)
class TriForceConfig(Keys):
    """TriForce's keys in ``speculative_config``, described in ``config/keys.py``.

    Raises:
        ValueError: a value is invalid; the message names the value, the reason and a fix.
    """

    def __post_init__(self) -> None:
        for name in KEYS:
            check_key(name, getattr(self, name))
        if self.draft_sources is not None:
            parse_sources(self.draft_sources)
        if self.levels not in LEVEL_SETS:
            raise ValueError(
                f"levels={self.levels!r} is not a set of levels that can run. Use one of "
                f"{LEVEL_SETS}."
            )
        if self.selection not in POLICIES.names:
            raise ValueError(
                f"selection={self.selection!r} is not a selection policy. Use "
                f"{' or '.join(map(repr, POLICIES.names))}, or install the package that has it "
                "in this environment."
            )
        if self.level2_model == "":
            raise ValueError(
                "level2_model='' names no model. Use a dtype, a scheme or a checkpoint, or leave "
                "it out."
            )
        if self.level2_model is not None and "2" not in self.levels.split(","):
            raise ValueError(
                f"level2_model={self.level2_model!r} is not used with levels={self.levels!r}. "
                "Leave one of them out."
            )
        recent, budget = self.retrieval_recent_tokens, self.retrieval_budget
        if recent is not None and budget is not None and recent >= budget:
            raise ValueError(
                f"retrieval_recent_tokens={recent} leaves nothing of retrieval_budget={budget} to "
                "retrieve. Use a smaller value or a larger budget."
            )

    @classmethod
    def from_speculative_config(cls, keys: Mapping[str, Any]) -> "TriForceConfig":
        """Read the keys of a ``speculative_config``, without ``method`` and keys of the draft."""
        for key in keys:
            if key in _GONE_KEYS:
                raise ValueError(f"speculative_config key {key!r} is gone: {_GONE_KEYS[key]}")
            if key not in KEYS:
                near = difflib.get_close_matches(key, [*KEYS, "model"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {list(KEYS)}"
                raise ValueError(f"speculative_config key {key!r} is unknown to TriForce; {hint}")
        return cls(**keys)

    def with_defaults(
        self,
        can_adapt: bool,
        model: str | None = None,
        has_fixed_shapes: bool = False,
        max_num_seqs: int | None = None,
        is_head: bool = False,
        has_states: bool = False,
        max_length: int | None = None,
    ) -> "TriForceConfig":
        """Fill in lengths, sources of drafts and the keys that the controller chooses.

        Args:
            can_adapt: True if the engine has a controller.
            has_fixed_shapes: True on Model Runner V2, where gamma is fixed at start.
            is_head: True if ``model`` is an EAGLE-3 head or has MTP layers.
            has_states: True if layers of the target keep a recurrent state for each token.
            max_length: limit of a length that is not given.

        Raises:
            ValueError: a given key does not fit these.
        """
        open_keys = {
            "context": self.min_context is None,
            "gamma": self.gamma is None and self.levels == "1,2,3",
            "length": self.num_speculative_tokens is None,
        }
        adapts = self.adaptive and can_adapt and not self.is_plain
        adaptive_keys = tuple(name for name in open_keys if open_keys[name] and adapts)
        num_seqs = _MAX_SEQS if self.kv_offload_gib is None else _MAX_SEQS_OFFLOAD
        if has_states and "2" in self.levels:
            num_seqs = _MAX_SEQS_STATES
        config = dataclasses.replace(
            self,
            max_slowdown=self._slowdown(adaptive_keys),
            prompt_lookup_max=self.prompt_lookup_max or _MAX_NGRAM,
            max_speculating_seqs=self.max_speculating_seqs or num_seqs,
            adaptive_keys=adaptive_keys,
        )
        if self.is_plain:
            self._check_plain(model)
            # vLLM has no speculative method without a token.
            return dataclasses.replace(config, num_speculative_tokens=1, gamma=1)
        sources = self._sources(model, config.chooses_source, is_head)
        length = self._length("length" in adaptive_keys, has_fixed_shapes, max_num_seqs)
        gamma = FIXED_GAMMA
        if "gamma" in adaptive_keys and not has_states:
            if not (has_fixed_shapes and SOURCES[sources[0]].needs_model):
                # Chosen while running, or drafts are free, and level 2's reads do not grow with it.
                gamma = _MAX_GAMMA
            elif is_head:
                gamma = _HEAD_GAMMA
        length = min(length, max_length or length, _MAX_STATES if has_states else length)
        return dataclasses.replace(
            config,
            num_speculative_tokens=self.num_speculative_tokens or length,
            gamma=self.gamma or gamma,
            draft_sources=",".join(sources),
            num_sink_tokens=self.num_sink_tokens if is_head else self.num_sink_tokens or _NUM_SINKS,
        )

    def _sources(self, model: str | None, can_choose: bool, is_head: bool) -> tuple[str, ...]:
        """Choose level 1's sources of drafts, and check its keys, which not all sources use."""
        if self.levels == "2,3":
            levels = f"levels={self.levels!r}"
            self._check_unused(levels, "level 1 takes no part", model, LEVEL1_KEYS)
        sources = choose_sources(self.draft_sources, model, can_choose, is_head)
        if self.prompt_lookup_max is not None and "prompt_lookup" not in sources:
            raise ValueError(
                f"prompt_lookup_max={self.prompt_lookup_max} is not used: level 1 drafts from "
                f"{' and '.join(sources)} here. Leave it out, or add 'prompt_lookup' to "
                "draft_sources."
            )
        if is_head and self.num_sink_tokens is not None:
            raise ValueError(
                f"num_sink_tokens={self.num_sink_tokens} is not used: the head {model!r} "
                "has a window of recent tokens alone. Leave it out."
            )
        return sources

    def _length(self, adapts: bool, has_fixed_shapes: bool, max_num_seqs: int | None) -> int:
        """Return the length of proposals, the longest one where the controller chooses it."""
        if not adapts:
            return FIXED_LENGTH
        if self.kv_offload_gib is None:
            return _MAX_FIXED_SHAPE_LENGTH if has_fixed_shapes else _MAX_LENGTH
        has_few = max_num_seqs is not None and max_num_seqs <= _FEW_REQUESTS
        return _MAX_LENGTH if has_few else _MAX_OFFLOAD_LENGTH

    def _slowdown(self, adaptive_keys: tuple[str, ...]) -> float:
        """Return ``max_slowdown``, 1 where the controller does not choose who speculates."""
        if "context" in adaptive_keys:
            return _MAX_SLOWDOWN if self.max_slowdown is None else self.max_slowdown
        if self.max_slowdown is not None and not self.is_plain:
            reason = "without the controller" if self.min_context is None else "with min_context"
            raise ValueError(
                f"max_slowdown={self.max_slowdown} is not supported {reason}: requests then "
                "speculate whether they gain or lose. Leave one of them out."
            )
        return 1.0

    def _check_plain(self, model: str | None) -> None:
        """Check a config of plain decoding, which is for ``kv_offload_gib`` alone."""
        levels = f"levels={self.levels!r}"
        if self.kv_offload_gib is None:
            raise ValueError(
                f"{levels} is plain decoding, which vLLM does by itself. Set kv_offload_gib, or "
                "drop method='triforce'."
            )
        names = (*LEVEL1_KEYS, "num_speculative_tokens", "min_context", "max_slowdown")
        self._check_unused(levels, "nothing is drafted or proposed", model, names)

    def _check_unused(self, setting: str, reason: str, model: str | None, names: tuple) -> None:
        """Refuse a draft model and given keys that have no use beside ``setting``."""
        for name, value in {"model": model, **{n: getattr(self, n) for n in names}}.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is not supported with {setting}: {reason}. Leave one of "
                    "them out."
                )

    def resolve(self, block_size: int) -> ResolvedConfig:
        """Fit sizes to retrieval chunks, mostly vLLM's KV blocks.

        Budgets are rounded up to whole blocks, and to room for one retrieved chunk. A config
        without its defaults gets those of an engine without a controller.

        Raises:
            ValueError: a size does not fit; the message names one that does.
        """
        config = self if self.adaptive_keys is not None else self.with_defaults(can_adapt=False)
        budget, recent = self.retrieval_budget, self.retrieval_recent_tokens
        limits = (_MIN_BUDGET, _MAX_BUDGET) if budget is None else (budget, budget)
        if recent is None:
            recent = min(_MAX_RECENT, round_up(limits[0], block_size) // 4)
            recent = max(block_size, recent // block_size * block_size)
        if recent % block_size:
            raise ValueError(
                f"retrieval_recent_tokens={recent} must be a multiple of the KV block "
                f"({block_size} tokens); use {round_up(recent, block_size)}"
            )
        min_tokens, max_tokens = (fit_budget(limit, recent, block_size) for limit in limits)
        min_context = _NEVER if self.is_plain else config.min_context
        if min_context is None:
            min_context = 0 if "context" in config.adaptive_keys else 2 * max_tokens
        values = {
            **vars(config),
            "retrieval_budget": max_tokens,
            "retrieval_recent_tokens": recent,
            "min_context": min_context,
            "draft_sources": config.draft_sources or "",
            "num_sink_tokens": config.num_sink_tokens or 0,
        }
        return ResolvedConfig(**values, block_size=block_size, min_retrieval_budget=min_tokens)


def read_config(vllm_config) -> tuple[ResolvedConfig, str | None]:
    """Read the resolved keys and the draft model's name from a running engine's config."""
    keys = dict(vllm_config.additional_config[METHOD])
    draft_model = keys.pop("draft_model")
    return ResolvedConfig(**keys), draft_model
