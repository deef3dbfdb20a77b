"""Time of a step: its passes, and the work outside them.

A pass is a roofline: bytes over bandwidth or operations over peak, and launches.

A proposal is made in rounds. A round that misses ``m`` tokens drafts ``d = min(gamma, m - 1)``
tokens with level 1, one pass each, and passes them through level 2 once. Of them ``j`` are accepted
with probability ``a1^j (1 - a1)`` for ``j < d`` and ``a1^d`` for all, and the round yields
``j + 1``. A full pass over ``k`` proposed tokens emits ``1 + a2 + ... + a2^k`` tokens: the accepted
ones and the bonus or recovered token.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.config import ResolvedConfig
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine

# Kernels in a pass's graph: of a layer, of its experts, and beside the layers (read off vLLM). A
# layer of level 2 had three copies and FlashAttention 3's preparation when the H200 was measured.
_LAYER_KERNELS, _MOE_LAYER_KERNELS, _PASS_KERNELS = 11, 5, 4
_LEVEL2_LAYER_KERNELS = 4
# Kernels, uploads and waits of a greedy step, counted with a draft on Model Runner V2 by the tool
# of commits fe8fb88 and 549a7e2. Kernels of drafting and of level 2's logits are in CUDA graphs.
STEP_KERNELS, STEP_UPLOADS, STEP_SYNCS = 20, 2, 1  # any step, stock vLLM's too
PROPOSAL_KERNELS, PROPOSAL_UPLOADS = 15, 4  # a proposal without rounds, and its verification
DRAFTING_KERNELS = 6  # a drafted token, beside its pass
LEVEL2_KERNELS = 3  # level 2's logits
ROUND_KERNELS, DIRECT_ROUND_KERNELS = 2, 1  # a round of levels 1 and 2, or of level 1 alone
SUMMARY_KERNELS = 5  # a proposal by level 2, for full chunks' mean keys; not counted, but read
# A layer's selection had three launches then, which returned at once where no request selected. It
# has two since, or none. One program for each KV head of a request searches its chunks, and mean
# keys take a small share of the bandwidth. Fitted to an H200 (32.0 to 51.8 us, docs/results.md).
SELECTION_KERNELS, IDLE_SELECTION_KERNELS, CPU_SELECTION_OPERATIONS = 3, 1.5, 12
_CHUNK_SECONDS, _SELECTION_BANDWIDTH_SHARE = 1.8e-9, 0.285
# Bytes of a logit in the sampler, and reads and writes of a row of logits for a verified token.
_LOGIT_BYTES, _LOGIT_READS = 4, 3
# Tokens that level 1 drafts in one graph for the full pass: gamma of Model Runner V2.
DIRECT_GAMMA = 2
# vLLM's default share of the device's memory; and the part of it that is neither weights nor KV
# cache: activations, logits, graphs.
_MEMORY_SHARE, OTHER_BYTES = 0.9, 2.5e9


PLAIN, DIRECT, LEVELS = "plain", "direct", "levels"
DRAFT, LOOKUP = "draft", "lookup"
_LENGTHS, _GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16), (0, 1, 2, 3, 4)
# Retrieval budget at which ``Acceptance.level2`` is given.
FULL_BUDGET = 4096
# Growth of level 2's rejections when the budget is halved (docs/results.md: 0.057
# at 4,096 tokens to 0.131 at 256, at a context of 16,384).
_REJECTIONS_PER_HALVING = 1.23


@dataclass(frozen=True)
class Setting:
    """Route and lengths of a proposal.

    Args:
        route: ``PLAIN``, ``DIRECT`` (level 1's tokens go straight to the full pass) or ``LEVELS``.
        num_tokens: tokens of a proposal, k.
        gamma: tokens that level 1 drafts for a pass of level 2.
        budget: tokens of KV cache that level 2 reads.
        source: draft source of level 1.
    """

    route: str
    num_tokens: int = 0
    gamma: int = 0
    budget: int = 0
    source: str = ""

    def __str__(self) -> str:
        if self.route == PLAIN:
            return "plain"
        if self.route == DIRECT:
            return f"{self.source} {self.num_tokens}"
        return f"levels {self.num_tokens}/{self.gamma}@{self.budget} {self.source}".rstrip()


STOCK = Setting(PLAIN)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates per tested token.

    Args:
        level2: of level 2's tokens by the full pass, at a budget of 4,096 tokens.
        draft, lookup: of level 1's tokens by level 2, by source.
        copy_rejections: factor on level 2's rejections, by a copy of the target.
    """

    level2: float
    draft: float = 0.5
    lookup: float = 0.3
    copy_rejections: float = 1.0

    def at(self, budget: int) -> float:
        """Level 2's acceptance at another budget."""
        halvings = math.log2(FULL_BUDGET / budget)
        rejections = (1 - self.level2) * self.copy_rejections
        return max(0.0, 1 - rejections * _REJECTIONS_PER_HALVING**halvings)

    def by_level2(self, source: str) -> float:
        return self.draft if source == DRAFT else self.lookup


def sources_of(config: ResolvedConfig) -> tuple[str, ...]:
    return tuple(LOOKUP if s in ("prompt_lookup", "suffix") else DRAFT for s in config.sources)


def settings(budget: int, sources: tuple[str, ...], levels: str = "1,2,3") -> list[Setting]:
    """List the settings to compare, plain decoding first; ``gamma=0`` is level 2 alone."""
    candidates = [STOCK]
    if "1" in levels:
        candidates += [Setting(DIRECT, n, source=source) for n in _LENGTHS for source in sources]
    for k in _LENGTHS if "2" in levels else ():
        for gamma in sorted({min(gamma, k - 1) for gamma in _GAMMAS}):
            for source in sources if gamma else ("",):
                candidates.append(Setting(LEVELS, k, gamma, budget, source))
    return candidates


def pass_seconds(
    machine: Machine,
    model: Geometry,
    tokens: Sequence[int],
    kv_tokens: Sequence[int],
    num_graphs: float = 1,
    more_kernels: int = 0,
) -> float:
    """Predict a pass of requests with ``tokens`` each over ``kv_tokens`` of KV cache each.

    Weights are read once, experts if a token is routed to them, each request's KV cache once for
    all tokens. Dense layers, experts and attention follow one another; each takes the longer of
    reading and computing.

    Args:
        num_graphs: CUDA graphs of the pass; passes that share one have a share of it each.
        more_kernels: kernels of a layer beside those of stock vLLM.
    """
    each, num_tokens = model.bytes_each, sum(tokens)
    bandwidth = machine.bandwidth * machine.bandwidth_share
    flops = machine.flops * machine.flops_share
    embedding_rows = num_tokens * model.hidden * each
    dense_s = max(
        (model.dense_weights * each + embedding_rows) / bandwidth,
        2 * model.dense_weights * num_tokens / flops,
    )
    layer_experts = model.expert_weights * model.layers
    experts_s = max(
        layer_experts * model.experts_touched(num_tokens) * each / bandwidth,
        2 * layer_experts * model.active_experts * num_tokens / flops,
    )
    pairs = sum(q * c for q, c in zip(tokens, kv_tokens))
    kv_bandwidth = machine.bandwidth * (
        machine.attention_bandwidth_share or machine.bandwidth_share
    )
    kv_flops = machine.flops * (machine.attention_flops_share or machine.flops_share)
    attention_s = max(
        sum(kv_tokens) * model.kv_bytes_per_token / kv_bandwidth,
        4 * model.layers * model.heads * model.head_dim * pairs / kv_flops,
    )
    attention_s /= machine.occupancy(len(tokens), max(tokens), model.heads, model.kv_heads)
    layer_kernels = _LAYER_KERNELS + _MOE_LAYER_KERNELS * (model.experts > 0) + more_kernels
    kernels = model.layers * layer_kernels + _PASS_KERNELS
    launch_s = kernels * machine.kernel_seconds + num_graphs * machine.graph_launch_seconds
    return dense_s + experts_s + attention_s + launch_s


def tokens_per_step(level2_acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens of a full pass, as ``mean_acceptance_length``."""
    return sum(level2_acceptance**n for n in range(num_speculative_tokens + 1))


def acceptance_for(tokens: float, num_speculative_tokens: int) -> float:
    """Return the acceptance at which ``tokens_per_step()`` is ``tokens``."""
    steps = 1 << 30
    place = bisect_left(
        range(steps), tokens, key=lambda n: tokens_per_step(n / steps, num_speculative_tokens)
    )
    return place / steps


@cache
def inner_loop(
    level1_acceptance: float, num_speculative_tokens: int, gamma: int
) -> tuple[float, float]:
    """Expected passes of level 2 and of level 1 for one proposal."""

    @cache
    def expected(missing: int) -> tuple[float, float]:
        if missing <= 0:
            return 0.0, 0.0
        drafted = min(gamma, missing - 1)
        rounds, steps = 1.0, float(drafted)
        for accepted in range(drafted + 1):
            chance = level1_acceptance**accepted
            if accepted < drafted:
                chance *= 1 - level1_acceptance
            more_rounds, more_steps = expected(missing - accepted - 1)
            rounds += chance * more_rounds
            steps += chance * more_steps
        return rounds, steps

    return expected(num_speculative_tokens)


@dataclass(frozen=True)
class Step:
    """Expected step of a batch; ``speedup`` is decode speed over plain decoding."""

    setting: Setting
    seconds: float
    speedup: float = 1.0


@dataclass
class Predictor:
    """Predicts steps of a model on a machine.

    Args:
        draft: level 1's model; None for prompt lookup alone.
        window: tokens of KV cache that the draft reads.
        chunk: tokens of a retrieval chunk; level 2 scores one mean key of each.
        copy_bytes_each: bytes of a weight of level 2's copy of the target; None without a copy.
    """

    machine: Machine
    model: Geometry
    draft: Geometry | None = None
    window: int = 256
    chunk: int = 16
    copy_bytes_each: float | None = None

    def fits(self, context: int, batch: int) -> bool:
        """True if weights, KV cache and mean keys fit the device's memory."""
        draft_bytes = self.draft.weight_bytes if self.draft else 0
        copy_bytes = self.model.weights * (self.copy_bytes_each or 0)
        kv_bytes = context * batch * self.model.kv_bytes_per_token * (1 + 0.5 / self.chunk)
        room_bytes = _MEMORY_SHARE * self.machine.memory_bytes - OTHER_BYTES
        return self.model.weight_bytes + draft_bytes + copy_bytes + kv_bytes <= room_bytes

    # Passes, in seconds.

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        return pass_seconds(self.machine, self.model, tokens, contexts)

    def level2_pass(self, batch: int, tokens: int, budget: int, context: int) -> float:
        """Predict a pass of the target, or of its copy, over a part of the KV cache.

        Each KV head of a request is a sequence; the number of thread blocks is the same.
        """
        model = self.model
        if self.copy_bytes_each is not None:
            model = replace(model, bytes_each=self.copy_bytes_each)
        kv_tokens = [min(budget, context)] * batch
        tokens_each = [tokens] * batch
        return pass_seconds(
            self.machine, model, tokens_each, kv_tokens, more_kernels=_LEVEL2_LAYER_KERNELS
        )

    def draft_pass(self, batch: int, context: int, gamma: int = 1) -> float:
        """Predict one of ``gamma`` draft passes that share a CUDA graph."""
        if self.draft is None:
            return 0.0
        kv_tokens = [min(self.window, context)] * batch
        return pass_seconds(self.machine, self.draft, [1] * batch, kv_tokens, 1 / max(1, gamma))

    # Outside the passes, in seconds.

    def _launch_s(self, kernels: float, uploads: float = 0, num_logits: float = 0) -> float:
        machine = self.machine
        logits_bytes = num_logits * self.model.vocab * _LOGIT_BYTES * _LOGIT_READS
        return (
            kernels * machine.launch_seconds
            + uploads * machine.upload_seconds
            + logits_bytes / (machine.bandwidth * machine.bandwidth_share)
        )

    def step_overhead(self, batch: int) -> float:
        wait_s = STEP_SYNCS * self.machine.sync_seconds
        return wait_s + self._launch_s(STEP_KERNELS, STEP_UPLOADS, batch)

    def drafts_overhead(self, batch: int, num_tokens: int) -> float:
        return self._launch_s(PROPOSAL_KERNELS, PROPOSAL_UPLOADS, batch * num_tokens)

    def round_overhead(self, batch: int, gamma: int, has_draft: bool) -> float:
        graph_kernels = LEVEL2_KERNELS + gamma * DRAFTING_KERNELS * has_draft
        launch_s = self._launch_s(ROUND_KERNELS, 0, batch * (gamma + 1))
        return launch_s + graph_kernels * self.machine.kernel_seconds

    def selection_overhead(
        self, batch: int, context: int, rounds: float, selections: float
    ) -> float:
        """Predict the seconds that selecting in each layer adds to the passes of level 2.

        Mean keys of 8 bits are read twice (kernels/pass_selection.py).
        """
        machine, model = self.machine, self.model
        num_chunks = context / self.chunk
        mean_keys = batch * num_chunks * model.layers * model.kv_heads * model.head_dim
        share, launches = machine.bandwidth_share, CPU_SELECTION_OPERATIONS
        search_s = 0.0
        if machine.num_sms:
            share, launches = _SELECTION_BANDWIDTH_SHARE, SELECTION_KERNELS
            waves = math.ceil(batch * model.kv_heads / machine.num_sms)
            search_s = model.layers * waves * num_chunks * _CHUNK_SECONDS
        read_s = 2 * mean_keys / (machine.bandwidth * share)
        idle_kernels = (rounds - selections) * IDLE_SELECTION_KERNELS
        kernels = (selections * launches + idle_kernels) * model.layers
        return selections * (search_s + read_s) + kernels * machine.kernel_seconds

    # Steps.

    def step(self, setting: Setting, context: int, batch: int, acceptance: Acceptance) -> Step:
        contexts = [context] * batch
        plain_s = self.full_pass([1] * batch, contexts) + self.step_overhead(batch)
        if setting.route == PLAIN:
            return Step(setting, plain_s)
        k, gamma = setting.num_tokens, setting.gamma
        has_draft = setting.source == DRAFT
        seconds = self.step_overhead(batch) + self.drafts_overhead(batch, k)
        seconds += self.full_pass([k + 1] * batch, contexts)
        if setting.route == LEVELS:
            rounds, drafts = inner_loop(acceptance.by_level2(setting.source), k, gamma)
            selections = min(rounds, 1 + (k - 1) // TOKENS_PER_SELECTION)
            seconds += rounds * self.level2_pass(batch, gamma + 1, setting.budget, context)
            seconds += rounds * self.round_overhead(batch, gamma, has_draft)
            seconds += self.selection_overhead(batch, context, rounds, selections)
            seconds += self._launch_s(SUMMARY_KERNELS)
            accepted = acceptance.at(setting.budget)
        else:
            gamma, drafts = DIRECT_GAMMA, k
            seconds += self._launch_s(-(-k // DIRECT_GAMMA) * DIRECT_ROUND_KERNELS)
            seconds += k * DRAFTING_KERNELS * has_draft * self.machine.kernel_seconds
            # Levels 1 and 2 are taken to err independently.
            accepted = acceptance.by_level2(setting.source) * acceptance.level2
        if has_draft:
            seconds += drafts * self.draft_pass(batch, context, gamma)
        return Step(setting, seconds, tokens_per_step(accepted, k) * plain_s / seconds)

    def best(
        self, among: Sequence[Setting], context: int, batch: int, acceptance: Acceptance
    ) -> Step:
        """Return the fastest setting's step, or the plain one if none is faster."""
        usable = [s for s in among if self.draft is not None or s.source != DRAFT]
        steps = [self.step(setting, context, batch, acceptance) for setting in (STOCK, *usable)]
        return max(steps, key=lambda step: step.speedup)

    def break_even(
        self, among: Sequence[Setting], context: int, batch: int, acceptance: Acceptance
    ) -> dict[str, Any] | None:
        """Return the point of the setting that pays from the lowest acceptance; None if none pays.

        Args:
            acceptance: its acceptance of level 1's tokens by level 2 decides the rounds.

        Returns:
            ``setting``, ``tokens`` of a step, accepted ones and the bonus token, and
            ``acceptance`` of the proposed tokens by the full pass.
        """
        plain_s = self.step(STOCK, context, batch, acceptance).seconds
        points: list[dict[str, Any]] = []
        for setting in among:
            tokens = self.step(setting, context, batch, acceptance).seconds / plain_s
            if tokens <= setting.num_tokens + 1:
                needed = acceptance_for(tokens, setting.num_tokens)
                points.append({"setting": setting, "tokens": tokens, "acceptance": needed})
        return min(points, key=lambda point: point["acceptance"], default=None)
