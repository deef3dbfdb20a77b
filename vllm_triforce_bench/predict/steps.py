"""The time of a step: its passes, and everything outside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine
from vllm_triforce_bench.predict.passes import NOTHING, Pass, model_pass, uniform_pass
from vllm_triforce_bench.predict.settings import (
    DRAFT,
    LEVELS,
    PLAIN,
    STOCK,
    Acceptance,
    Setting,
)
from vllm_triforce_bench.predict.speedup import Costs, inner_loop, speedup, tokens_per_step

# Bytes of a logit as the sampler reads it.
_LOGIT_BYTES = 4
# Tokens that level 1 drafts together where they go straight to the full pass: gamma of Runner V2.
DIRECT_GAMMA = 2
# Of the device's memory, what vLLM takes by default; and of that, what is neither weights nor KV
# cache: activations, logits, graphs.
_MEMORY_SHARE, OTHER_BYTES = 0.9, 2.5e9


@dataclass(frozen=True)
class Step:
    """A step of a batch, expected.

    Args:
        tokens: that each request gets.
        passes_seconds: of the models' passes, by what they are.
        outside_seconds: everything outside them.
        limit_seconds: of the passes, were all bytes read at peak bandwidth and nothing else done.
        speedup: over decoding plainly.
    """

    setting: Setting
    tokens: float
    passes_seconds: dict[str, float]
    outside_seconds: float
    limit_seconds: float
    speedup: float = 1.0

    @property
    def seconds(self) -> float:
        return sum(self.passes_seconds.values()) + self.outside_seconds

    @property
    def share_outside(self) -> float:
        return self.outside_seconds / self.seconds

    @property
    def share_of_limit(self) -> float:
        """How much of the step is reading, or computing, that no machine of its kind could do
        faster."""
        return self.limit_seconds / self.seconds


@dataclass
class Predictor:
    """What steps of a model take on a machine.

    Args:
        draft: level 1's model; None: prompt lookup alone.
        window: tokens of KV cache that the draft reads.
        chunk: tokens of a retrieval chunk, of which level 2 looks at one mean key.
        refresh_interval: steps between two selections.
    """

    machine: Machine
    model: Geometry
    draft: Geometry | None = None
    counts: Counts = field(default_factory=Counts)
    window: int = 256
    chunk: int = 16
    refresh_interval: int = 8

    def needed_bytes(self, context: int, batch: int) -> float:
        """Weights, KV cache and mean keys."""
        draft = self.draft.weight_bytes if self.draft else 0
        kv = context * batch * self.model.kv_bytes_per_token
        return self.model.weight_bytes + draft + kv * (1 + 0.5 / self.chunk)

    @property
    def room_bytes(self) -> float:
        """Of the device's memory, for what ``needed_bytes`` counts."""
        return _MEMORY_SHARE * self.machine.memory_bytes - OTHER_BYTES

    def fits(self, context: int, batch: int) -> bool:
        return self.needed_bytes(context, batch) <= self.room_bytes

    # Passes.

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> Pass:
        """Of requests with ``tokens`` each at ``contexts``."""
        return model_pass(self.machine, self.model, self.counts, tokens, contexts)

    def uniform_full_pass(self, batch: int, tokens: int, context: int) -> Pass:
        """Of ``batch`` requests that are alike."""
        return self._uniform_pass(self.model, batch, tokens, context)

    def level2_pass(self, batch: int, tokens: int, budget: int, context: int) -> Pass:
        """Of ``batch`` requests with ``tokens`` each: the target over a part of its KV cache.

        A KV head of a request is a sequence of its own; thread blocks are as many either way.
        """
        return self._uniform_pass(self.model, batch, tokens, min(budget, context))

    def draft_pass(self, batch: int, context: int, gamma: int = 1) -> Pass:
        """One of ``gamma`` that are in a graph together."""
        if self.draft is None:
            return NOTHING
        graphs = self.counts.graphs_per_pass / max(1, gamma)
        counts = replace(self.counts, graphs_per_pass=graphs)
        window = min(self.window, context)
        return uniform_pass(self.machine, self.draft, counts, batch, 1, window)

    def _uniform_pass(self, model: Geometry, batch: int, tokens: int, kv_tokens: int) -> Pass:
        return uniform_pass(self.machine, model, self.counts, batch, tokens, kv_tokens)

    # What is outside them.

    def _launched(self, kernels: float, uploads: float = 0, num_logits: float = 0) -> float:
        machine = self.machine
        logits = num_logits * self.model.vocab * _LOGIT_BYTES * self.counts.logits_reads
        return (
            kernels * machine.launch_seconds
            + uploads * machine.upload_seconds
            + logits / (machine.bandwidth * machine.bandwidth_share)
        )

    def step_overhead(self, batch: int) -> float:
        """Of a plain step, stock vLLM's."""
        counts = self.counts
        waits = counts.step_syncs * self.machine.sync_seconds
        return waits + self._launched(counts.step_kernels, counts.step_uploads, batch)

    def drafts_overhead(self, batch: int, num_tokens: int) -> float:
        """What a proposal adds to it, rounds and selection apart."""
        counts = self.counts
        kernels = counts.verified_kernels + counts.proposal_kernels
        return self._launched(kernels, counts.proposal_uploads, batch * num_tokens)

    def round_overhead(self, batch: int, gamma: int, has_draft: bool) -> float:
        """Of levels 1 and 2."""
        in_graphs = self.counts.level2_kernels + self._drafting(gamma, has_draft)
        launched = self._launched(self.counts.round_kernels, 0, batch * (gamma + 1))
        return launched + in_graphs * self.machine.kernel_seconds

    def direct_overhead(self, num_tokens: int, has_draft: bool) -> float:
        """Of level 1 by itself."""
        rounds = -(-num_tokens // DIRECT_GAMMA)
        in_graphs = self._drafting(num_tokens, has_draft) * self.machine.kernel_seconds
        return self._launched(rounds * self.counts.direct_round_kernels) + in_graphs

    def _drafting(self, num_tokens: int, has_draft: bool) -> float:
        """Kernels beside the draft's passes."""
        return num_tokens * self.counts.drafting_kernels if has_draft else 0.0

    def selection_seconds(self, batch: int, context: int) -> float:
        """A step's share."""
        machine = self.machine
        means = batch * context / self.chunk * self.model.kv_bytes_per_token / 2
        read = means / (machine.bandwidth * machine.bandwidth_share)
        return (read + self._launched(self.counts.selection_kernels)) / self.refresh_interval

    # Steps.

    def costs(self, setting: Setting, context: int, batch: int) -> Costs:
        """As ``speedup()`` takes them, in milliseconds."""
        stock = self.plain_pass(context, batch).seconds + self.step_overhead(batch)
        full = self.uniform_full_pass(batch, setting.num_tokens + 1, context).seconds
        full += self.step_overhead(batch) + self.drafts_overhead(batch, setting.num_tokens)
        has_draft = setting.source == DRAFT
        together = setting.gamma if setting.route == LEVELS else DIRECT_GAMMA
        level1 = self.draft_pass(batch, context, together).seconds if has_draft else 0.0
        tokens = setting.gamma + 1
        level2 = self.level2_pass(batch, tokens, setting.budget or context, context).seconds
        parts = (
            stock,
            self.selection_seconds(batch, context),
            level1,
            level2,
            self.round_overhead(batch, setting.gamma, has_draft),
            full,
        )
        return Costs(*(1e3 * seconds for seconds in parts))

    def plain_pass(self, context: int, batch: int) -> Pass:
        return self.uniform_full_pass(batch, 1, context)

    def step(self, setting: Setting, context: int, batch: int, acceptance: Acceptance) -> Step:
        """With this setting, at this acceptance."""
        plain, overhead = self.plain_pass(context, batch), self.step_overhead(batch)
        stock_seconds = plain.seconds + overhead
        if setting.route == PLAIN:
            return Step(setting, 1.0, {"full": plain.seconds}, overhead, plain.limit_seconds)
        k, gamma = setting.num_tokens, setting.gamma
        full = self.uniform_full_pass(batch, k + 1, context)
        has_draft = setting.source == DRAFT
        together = gamma if setting.route == LEVELS else DIRECT_GAMMA
        level1 = self.draft_pass(batch, context, together) if has_draft else NOTHING
        level2 = NOTHING
        overhead += self.drafts_overhead(batch, k)
        if setting.route == LEVELS:
            rounds, steps = inner_loop(acceptance.by_level2(setting.source), k, gamma)
            each = self.level2_pass(batch, gamma + 1, setting.budget, context)
            level1, level2 = level1.times(steps), each.times(rounds)
            overhead += rounds * self.round_overhead(batch, gamma, has_draft)
            overhead += self.selection_seconds(batch, context)
            accepted = acceptance.at(setting.budget)
            gained = speedup(
                self.costs(setting, context, batch),
                accepted,
                acceptance.by_level2(setting.source),
                k,
                gamma,
            )
        else:
            level1 = level1.times(k)
            overhead += self.direct_overhead(k, has_draft)
            accepted = acceptance.straight(setting.source)
            seconds = full.seconds + level1.seconds + overhead
            gained = tokens_per_step(accepted, k) * stock_seconds / seconds
        passes = {"level 1": level1, "level 2": level2, "full": full}
        return Step(
            setting,
            tokens_per_step(accepted, k),
            {name: its.seconds for name, its in passes.items()},
            overhead,
            sum(its.limit_seconds for its in passes.values()),
            gained,
        )

    def best(
        self, among: Sequence[Setting], context: int, batch: int, acceptance: Acceptance
    ) -> Step:
        """The fastest setting's step; decoding plainly where nothing is faster."""
        usable = [s for s in among if self.draft is not None or s.source != DRAFT]
        found = [self.step(setting, context, batch, acceptance) for setting in usable]
        stock = self.step(STOCK, context, batch, acceptance)
        return max([stock, *found], key=lambda step: step.speedup)
