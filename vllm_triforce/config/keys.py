"""TriForce's keys in ``speculative_config``: type, range, default and help of each, in one entry.

``tools/docs_tables.py`` generates docs/keys.md from the entries. Texts are Markdown.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args

METHOD = "triforce"

# Versions of vLLM that tests/contract covers.
SUPPORTED_VLLM = (">=0.32.0", "<0.34")

# vLLM's rejection sampler takes at most this many draft tokens per request and step
# (MAX_SPEC_LEN in vllm/v1/sample/rejection_sampler.py).
MAX_NUM_SPECULATIVE_TOKENS = 128

# Sets of levels that can run; the last one is plain decoding.
LEVEL_SETS = ("1,2,3", "1,3", "2,3", "3")

# The paper's gamma 2 and gamma 1, used where the controller chooses neither.
FIXED_LENGTH, FIXED_GAMMA = 6, 2

_PROPOSAL, _LEVEL2, _LEVEL1, _MEMORY, _LOG = "Proposals", "Level 2", "Level 1", "Memory", "The log"


@dataclass(frozen=True)
class Key:
    """Description of a key, for docs/keys.md."""

    section: str
    help: str
    unit: str = ""
    low: float | None = None  # inclusive bounds
    high: float | None = None
    default_text: str = ""  # if the default is not a fixed value
    change: str = ""  # when to change the value


def _key(default: Any, section: str, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"key": Key(section, help, **more)})


@dataclass(frozen=True)
class Keys:
    """All keys. ``TriForceConfig.with_defaults()`` and ``resolve()`` replace those of None."""

    num_speculative_tokens: int = _key(
        None,
        _PROPOSAL,
        "Most tokens of a proposal, which a full pass verifies (the paper's gamma 2). Chosen for "
        "each request and step: up to 32 on Runner V1 and 12 on V2. On V2 with `kv_offload_gib` up "
        "to 16, or 32 if `max_num_seqs` is at most 16. With state space or [gated delta "
        "nets](compatibility.md#gated-delta-nets) up to 4. With LoRA fewer, so that a step "
        "(`--max-num-batched-tokens`) has room for `max_num_seqs` proposals, as vLLM requires. "
        "Without the controller: 6",
        unit="tokens",
        low=1,
        high=MAX_NUM_SPECULATIVE_TOKENS,
        default_text="chosen",
        change="to compare lengths, or to lower the number of tokens that a step verifies",
    )
    gamma: int = _key(
        None,
        _PROPOSAL,
        "Tokens that level 1 drafts for each pass of level 2 (the paper's gamma 1). Runner V1 "
        "chooses it while running, up to 4. Runner V2 fixes it at start: 2 with a draft model, 3 "
        "with a head, 4 with prompt lookup alone; with [gated delta "
        "nets](compatibility.md#gated-delta-nets) 2. Without the controller: 2",
        unit="tokens",
        low=1,
        high=MAX_NUM_SPECULATIVE_TOKENS,
        default_text="chosen",
        change="if the draft is much better or worse than usual. A given `gamma` leaves one of the "
        "`draft_sources`, unless `levels` is `1,3`",
    )
    min_context: int = _key(
        None,
        _PROPOSAL,
        "Requests with a shorter context decode plainly; 0 lets all speculate. The controller does "
        "not change a given value. Without the controller: twice `retrieval_budget`, by default "
        "8,192",
        unit="tokens",
        low=0,
        default_text="chosen",
        change="to keep short requests plain, or 0 to see speculation work",
    )
    adaptive: bool = _key(
        True,
        _PROPOSAL,
        "`true`: the [controller](controller.md) chooses `num_speculative_tokens`, `gamma` and "
        "`min_context` from measured times and acceptance, where you do not give them. `false`: "
        "there is no controller, and each has the value named in its row",
        change="`false` for runs that must not depend on timing",
    )
    max_slowdown: float = _key(
        None,
        _PROPOSAL,
        "Share of its speed that a request may lose to speculation, its own or that of others in "
        "its batch, by the controller's plan; on Runner V2 the measured loss of a batch is limited "
        "too. 1 sets no limit: the mean gain of a batch is then largest. Requests with a `seed` "
        "are exempt. Refused where `min_context` is given or `adaptive` is false",
        unit="share",
        low=0.01,
        high=1,
        default_text="0.05",
        change="larger for more tokens a second in batches of unlike requests",
    )
    levels: str = _key(
        LEVEL_SETS[0],
        _PROPOSAL,
        "Levels that take part. `1,3`: drafts go straight to the full pass, as for targets "
        "[without level 2](compatibility.md#without-level-2). `2,3`: level 2 proposes without "
        "drafts. `3`: plain decoding, with `kv_offload_gib` alone",
        change="for comparisons",
    )
    retrieval_budget: int = _key(
        None,
        _LEVEL2,
        "Tokens of the KV cache that level 2 reads: the first chunk, retrieved chunks and recent "
        "tokens. A chunk is a KV block (`--block-size`, by default 32 tokens on the CPU). Rounded "
        "up to whole chunks and to room for one retrieved chunk; the log says so if the value is "
        "yours",
        unit="tokens",
        low=1,
        default_text="an eighth of the context, at least 512 and at most 4,096",
        change="smaller for short contexts or cheap KV, larger if level 2's acceptance is low "
        "([rules](choosing.md#the-budget))",
    )
    retrieval_recent_tokens: int = _key(
        None,
        _LEVEL2,
        "Newest tokens that level 2 always keeps, in whole chunks; a part of `retrieval_budget`",
        unit="tokens",
        low=0,
        default_text="128; a quarter of a budget below 512",
        change="rarely",
    )
    selection: str = _key(
        "retrieval",
        _LEVEL2,
        "Policy by which level 2 selects its chunks. `retrieval`: by their mean keys, as in the "
        "paper. `quest`: by bounds from the least and greatest numbers of their keys ([arXiv "
        "2406.10774](https://arxiv.org/abs/2406.10774)). `streaming`: the first and the newest "
        "tokens, for comparisons. "
        "[One file](../CONTRIBUTING.md#a-selection-policy-in-one-file) adds another",
        change="if the [lab](lab.md) finds a higher acceptance with another one",
    )
    level2_model: str | None = _key(
        None,
        _LEVEL2,
        "A copy of the target with fewer bits a weight, for level 2's passes: a dtype such as "
        "`bfloat16`; for a target in 16 bits a scheme of vLLM's online quantization such as "
        "`fp8_per_tensor` (in short `fp8`); or a quantized checkpoint of the target, as a path, "
        "hub name or `NAME@REVISION`. The target's `--trust-remote-code` holds for it. It reads "
        "and writes the target's KV cache; its weights take memory from that cache. A request "
        "with an adapter is drafted without it",
        default_text="none: the target's weights",
        change="where level 2's passes read more weights than KV cache; measure it first "
        "([when](choosing.md#a-copy-for-level-2))",
    )
    num_sink_tokens: int = _key(
        None,
        _LEVEL1,
        "First tokens of the context (StreamingLLM's sinks) that a draft model's window keeps. "
        "Refused with a head, whose window has none",
        unit="tokens",
        low=1,
        default_text="16",
        change="rarely",
    )
    num_recent_tokens: int = _key(
        240,
        _LEVEL1,
        "Newest tokens that the window of a draft model or head keeps when it is rebuilt; between "
        "two rebuilds it grows. The window must fit the draft's positions",
        unit="tokens",
        low=1,
        change="larger for a draft that uses more context, smaller to save memory",
    )
    draft_sources: str = _key(
        None,
        _LEVEL1,
        "Sources of level 1's drafts, the preferred one first; `suffix`, on Runner V1, is one that "
        "reads [earlier answers](choosing.md#the-draft) too. The controller chooses between "
        "several. Where it does not (`adaptive` is false, or `gamma` is given and `levels` is not "
        "`1,3`) the default is the first one, and a list is refused. "
        "[One file](../CONTRIBUTING.md#a-source-of-drafts-in-one-file) adds another",
        unit="names, separated by commas",
        default_text="`draft_model,prompt_lookup` with a draft model, `head,prompt_lookup` with a "
        "head, `prompt_lookup` without",
        change="to leave prompt lookup out, or for a source of your own",
    )
    prompt_lookup_max: int = _key(
        None,
        _LEVEL1,
        "Most newest tokens that prompt lookup matches with earlier ones (the longest n-gram)",
        unit="tokens",
        low=1,
        default_text="8",
        change="rarely",
    )
    synthetic_level1_acceptance: float | None = _key(
        None,
        _LEVEL1,
        "With `rejection_sample_method: synthetic` alone: the probability that level 2, or the "
        "full pass where a draft goes straight to it, accepts a token of level 1, whatever the "
        "models say",
        unit="probability",
        low=0,
        high=1,
        default_text="none: level 2 tests by its own logits, the full pass by "
        "`synthetic_acceptance_rates`",
        change="for benchmarks: outputs are not the model's",
    )
    max_speculating_seqs: int = _key(
        None,
        _MEMORY,
        "Requests that are speculated on at a time; others decode plainly. Memory for this number "
        "is allocated at start: on Runner V2 all buffers of proposals, on V1 the draft's windows "
        "and a head's states. On V2 a batch of more than 256 requests, or four times this number "
        "if that is more, decodes plainly. On V1 each proposed token of a sampled request keeps 4 "
        "bytes per token of the vocabulary until it is verified",
        unit="requests",
        low=1,
        default_text="64; 4 with `kv_offload_gib`; 8 with [gated delta "
        "nets](compatibility.md#gated-delta-nets)",
        change="down if memory is short, up for large batches",
    )
    kv_offload_gib: float | None = _key(
        None,
        _MEMORY,
        "Host memory for the KV cache of the last layers ([how](offload.md)), on Runner V2 alone",
        unit="GiB of each rank",
        low=0.001,
        default_text="none",
        change="for contexts beyond the device's memory",
    )
    log_interval: float = _key(
        10.0,
        _LOG,
        "Time between two lines of per-level figures in the log; 0 logs none. On Runner V2 the "
        "host waits for the device once a line",
        unit="seconds",
        low=0,
        change="larger for a shorter log",
    )
    adaptive_keys: tuple[str, ...] = None  # type: ignore[assignment]
    """Choices of the controller, of ``context``, ``gamma`` and ``length``. Not given by users."""

    @property
    def is_plain(self) -> bool:
        return self.levels == "3"

    @property
    def chooses_source(self) -> bool:
        """True if the controller chooses between sources of drafts.

        A round's source is chosen with its ``gamma``; without level 2 there are no rounds.
        """
        keys = self.adaptive_keys
        return bool(keys) if self.levels == "1,3" else "gamma" in keys

    @property
    def window_tokens(self) -> int:
        """Capacity of level 1's private cache: sinks, recent tokens, and room to grow.

        The window grows by at least half of the recent tokens before it is rebuilt.
        """
        growth = max(self.num_recent_tokens // 2, self.num_speculative_tokens + self.gamma + 2)
        return (self.num_sink_tokens or 0) + self.num_recent_tokens + growth


KEYS: dict[str, tuple[dataclasses.Field, Key]] = {
    field.name: (field, field.metadata["key"])
    for field in dataclasses.fields(Keys)
    if "key" in field.metadata
}
"""Field and description of each key, by name."""


def check_key(name: str, value: Any) -> None:
    """Check type and range of a value. None is valid for a key whose default is None.

    Raises:
        ValueError: the type is wrong or the value is out of range.
    """
    field, key = KEYS[name]
    if value is None and field.default is None:
        return
    types = get_args(field.type) or (field.type,)
    if float in types:
        types += (int,)
    if isinstance(value, bool) != (bool in types) or not isinstance(value, types):
        raise ValueError(
            f"{name}={value!r} must be of type {types[0].__name__}, not {type(value).__name__}. "
            "Write it as JSON has it, or leave it out for the default."
        )
    high = math.inf if key.high is None else key.high
    if key.low is not None and not (key.low <= value <= high and value < math.inf):
        bounds = f"at least {key.low}" + ("" if key.high is None else f" and at most {key.high}")
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}")


def is_supported(version: str) -> bool:
    """True if TriForce supports this version of vLLM; not for one that does not parse (``dev``)."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(",".join(SUPPORTED_VLLM)).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
