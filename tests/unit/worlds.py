"""Measured costs of machines, and worlds in which a controller decides."""

import itertools
import random
from dataclasses import dataclass

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import PLAIN, Candidate, Controller, CostModel, StepTime
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL, SourceTraits

# One source whose tokens take passes, and one that has some where it finds a match.
DRAFT, LOOKUP = "a draft", "a lookup"
SOURCES = [
    SourceTraits(DRAFT, (0.5,), takes_passes=True),
    SourceTraits(LOOKUP, (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)),
]

# A 7B-like model: the pass is bound by reading weights and KV, more tokens cost little.
LONG_PAYS = Measurements(
    full_by_rows=[(1, 0.010), (16, 0.0105), (128, 0.014)],
    full_by_tokens=[(1, [(16, 0.010), (100_000, 0.040)]), (17, [(16, 0.011), (100_000, 0.048)])],
    level2_by_tokens=[(1, 0.0105), (17, 0.012)],
    level2_by_batch=[(1, [(0, 0.0105)]), (2, [(0, 0.011)])],
    draft=0.0005,
)
# A busy machine: every token of a pass costs as much as the first.
NOTHING_PAYS = Measurements(
    full_by_rows=[(1, 0.010), (128, 1.28)],
    full_by_tokens=[(1, [(16, 0.01), (100_000, 0.1)]), (17, [(16, 0.17), (100_000, 1.7)])],
    level2_by_tokens=[(1, 0.01), (17, 0.17)],
    level2_by_batch=[(1, [(0, 0.01)]), (2, [(0, 0.02)])],
    draft=0.004,
)
# The embedded pair on a CPU, about.
SMALL_ON_CPU = Measurements(
    full_by_rows=[(1, 0.004), (4, 0.0058), (16, 0.0095), (64, 0.022)],
    full_by_tokens=[
        (1, [(16, 0.004), (2000, 0.005), (16_000, 0.014)]),
        (17, [(16, 0.009), (2000, 0.0125), (16_000, 0.035)]),
    ],
    level2_by_tokens=[(1, 0.0045), (17, 0.010)],
    level2_by_batch=[(1, [(0, 0.0045)]), (2, [(0, 0.0055)])],
    draft=0.0008,
    draft_per_row=0.0002,
)
# An 8B model whose KV lies in host memory: 12 GB cross PCIe for each full pass at 100,000 tokens.
OVER_HOST = Measurements(
    full_by_rows=[(1, 0.018), (16, 0.019), (128, 0.025)],
    full_by_tokens=[(1, [(16, 0.018), (100_000, 0.470)]), (33, [(16, 0.020), (100_000, 0.480)])],
    level2_by_tokens=[(1, 0.019), (5, 0.0195)],
    level2_by_batch=[(1, [(0, 0.019)]), (2, [(0, 0.0195)])],
    draft=0.001,
)


def controller(measured: Measurements, has_draft=True, **keys) -> Controller:
    config = TriForceConfig(**keys).with_defaults(can_adapt=True, model=DRAFT).resolve(32)
    found = Controller(config, SOURCES if has_draft else SOURCES[1:])
    found.clock = itertools.count(0.0, 1e-4).__next__
    found.start(CostModel(measured))
    return found


def matched(length: int) -> dict[str, int]:
    """Return the match class of a match of ``length`` tokens."""
    return {LOOKUP: length - 1} if length else {}


def accepted(draw: random.Random, rate: float, length: int) -> int:
    """Draw the number of tokens before the first rejected one."""
    return next((i for i in range(length) if draw.random() >= rate), length)


@dataclass
class World:
    """A machine and a text.

    Args:
        level2, draft: acceptance of a token of level 2 by level 3, of the draft by level 2.
        overhead: seconds of every step beside its passes.
        speculating: further seconds of a step with drafts, which nothing predicts.
        deciding: seconds of a decision.
        max_tokens: of a proposal.
    """

    measured: Measurements
    level2: float
    draft: float
    overhead: float = 0.002
    speculating: float = 0.0
    deciding: float = 0.0
    max_tokens: int = 16

    def decode(
        self,
        controller: Controller,
        num_steps: int,
        context: int,
        size: int = 1,
        length: int = 10**6,
        seed: int = 0,
    ) -> float:
        """Return the tokens per second over those of plain decoding.

        Args:
            length: tokens of each request; another joins for one that leaves. Alone a request is
                greedy, in a batch it is sampled.
        """
        draw, truth, is_greedy = random.Random(seed), CostModel(self.measured), size == 1
        running: dict[str, int] = {}  # request -> emitted tokens
        controller.clock = itertools.count(0.0, self.deciding / 2 or 1e-4).__next__
        num_begun, num_tokens, seconds, plain_seconds = 0, 0, 0.0, 0.0
        max_tokens = min(self.max_tokens, controller.config.num_speculative_tokens)
        for _ in range(num_steps):
            controller.backoff.begin_step()
            has_joined = len(running) < size
            while len(running) < size:
                running[str(num_begun)], num_begun = 0, num_begun + 1
            names = list(running)
            contexts = [context + running[name] for name in names]
            choices, proposing = dict.fromkeys(names, PLAIN), 0.0
            if has_joined:
                controller.requests_joined()
            elif not controller.backoff.is_resting:
                candidates = [
                    Candidate(n, at, max_tokens, is_greedy=is_greedy)
                    for n, at in zip(names, contexts)
                ]
                choices = dict(zip(names, controller.choose(candidates)))
                proposing = self.deciding + self._propose(draw, controller, choices)
            lengths = [choices[name].num_tokens for name in names]
            kept = []
            for name, count in zip(names, lengths):
                is_drafted = choices[name].route == DRAFT
                rate = self.level2 * (self.draft if is_drafted else 1)
                kept.append(accepted(draw, rate, count))
            tokens = [1 + n for n in lengths]
            step = truth.full_pass(tokens, contexts) + self.overhead
            step += self.speculating if any(lengths) else 0.0
            planned = controller.take_plan()
            taken = StepTime(is_greedy, tokens, contexts, step, sum(lengths), proposing, sum(kept))
            if any(lengths) or controller.backoff.is_settled:
                controller.observe_step(taken, planned)
            seconds += step + proposing
            plain_seconds += truth.full_pass([1] * size, contexts) + self.overhead
            for name, count, num_accepted in zip(names, lengths, kept):
                if count:
                    controller.observe_full_pass(name, count, num_accepted)
                running[name] += num_accepted + 1
                num_tokens += num_accepted + 1
                if running[name] >= length:
                    del running[name]
                    controller.release(name)
        return num_tokens / seconds / (num_steps * size / plain_seconds)

    def _propose(self, draw, controller: Controller, choices: dict) -> float:
        """Run the passes of a step's proposals, and return their seconds."""
        truth, seconds = CostModel(self.measured), 0.0
        made = {name: 0 for name, choice in choices.items() if choice.route == HIERARCHICAL}
        while rows := [name for name in made if made[name] < choices[name].num_tokens]:
            counts = []
            for name in rows:
                most = choices[name].num_tokens - made[name] - 1
                route, count = controller.choose_draft(name, False, {}, len(rows), most)
                counts.append(count if route == DRAFT else 0)
            level1 = max(counts) * truth.draft(len(rows))
            level2 = truth.level2(len(rows), max(counts) + 1)
            for name, count in zip(rows, counts):
                kept = accepted(draw, self.draft, count)
                source = DRAFT if count else None
                controller.acceptance.observe_rounds(name, source, 0, 1, kept, int(kept < count))
                made[name] += kept + 1
            drafts = [n for n in counts if n]
            controller.measured.observe_level2(len(rows), max(counts) + 1, 0, level2)
            if drafts:
                drafts_s = max(drafts) * controller.measured.draft(len(drafts))
                controller.measured.observe_level1(drafts_s, level1)
            seconds += level1 + level2
        direct = [choice.num_tokens for choice in choices.values() if choice.route == DRAFT]
        return seconds + max(direct, default=0) * truth.draft(len(direct))
