"""Chooses, per step and request: speculate or not, how much, and by which levels.

The aim is that tokens come fastest, to every request (``planner.py``), from what passes cost
(``cost_model.py``) and how often each request's tokens are accepted (``acceptance.py``). What the
user fixed is not chosen, and a request with a seed gets fixed lengths: what it samples depends on
them, and must not depend on how busy the machine is.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Rates
from vllm_triforce.controller.backoff import PROBE_STEPS, SpeculationBackoff
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.drafts import DraftLengths
from vllm_triforce.controller.fixed import FixedChoices
from vllm_triforce.controller.learning import Learning, Planned
from vllm_triforce.controller.options import Candidate, Options, build_options
from vllm_triforce.controller.planner import (
    Plan,
    best_alone,
    plan,
    plan_by_routes,
    seconds_of_batch,
)
from vllm_triforce.controller.routes import PLAIN, Choice, SourceTraits
from vllm_triforce.controller.trials import TRIAL_SHARE

# Decisions between two adoptions of what was measured meanwhile; at first after each power of 2.
_ADOPT_EVERY = 16
# Steps with proposals after which the baseline is probed, at the earliest.
_PROBE_AFTER = 16
# Lengths of a proposal that are always compared; longer ones where their full pass was measured.
_SHORT_LENGTHS = range(1, 9)


class Controller(Learning):
    """One engine's.

    Args:
        sources: level 1's, the preferred one first: it is used where nothing is chosen.
        whole_rounds: whether rounds are planned, not made as long as tokens are missing.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        sources: Sequence[SourceTraits],
        whole_rounds: bool = False,
    ) -> None:
        super().__init__(config, sources)
        self._whole_rounds = whole_rounds
        self._preferred = sources[0]
        if whole_rounds:
            self.round_drafts = config.gamma * sources[0].takes_passes
        self._fixed = FixedChoices(config, sources)
        self._num_decisions = 0
        # Of the newest decision, in seconds: a request's share, and a place without attention.
        self.share = self.slope = 0.0
        self._num_held = 0  # steps that did the same as the one before
        self.is_steady = False  # whether it is what pays best, and nothing is tried out by it
        self.backoff = SpeculationBackoff()
        self._probed_at = 0
        self._optimistic_rates = Rates.hoped(sources)
        self._level1 = DraftLengths(config, self.sources, self.acceptance)

    def start(
        self, model: CostModel, adopt: Callable[[CostModel], CostModel] = lambda model: model
    ) -> None:
        """Begins to choose.

        Args:
            model: what this rank measured.
            adopt: from what this rank measured to what all ranks decide by: they have to decide
                alike, or their passes would wait for each other.
        """
        self.measured = model
        self._adopt = lambda: adopt(self.measured).copy()
        self._decide_by(self._adopt())

    def seeded_request_joined(self) -> None:
        """No rest may put off where its speculation begins."""
        self.backoff.reset()

    def requests_joined(self) -> None:
        """The prompts of requests without a seed have been read, up to their ends in this step; or
        requests that were here before have come back."""
        if "context" not in self.chooses:
            self.backoff.reset()
            return
        self.backoff.on_requests_joined()

    # Before a proposal.

    def hold(self) -> None:
        """A step does what was decided for the last one."""
        self._num_held += 1

    def choose(self, candidates: list[Candidate], num_plain: int = 0) -> list[Choice]:
        """What each candidate does in this step.

        Args:
            num_plain: further requests of the batch, which decode plainly whatever is chosen.
        """
        self.planned, self.is_steady = None, False
        chosen, expected = [self._fixed.choice(c) for c in candidates], [0.0] * len(candidates)
        if self.chooses:
            chosen, expected = self._choose(candidates, num_plain)
        for candidate, choice, tokens in zip(candidates, chosen, expected):
            self._chosen[candidate.request_id] = choice, tokens
        self._num_held = 0
        return chosen

    def _choose(
        self, candidates: list[Candidate], num_plain: int
    ) -> tuple[list[Choice], list[float]]:
        """And the tokens that each choice is expected to gain; 0 where that is not estimated."""
        self._adopt_measurements()
        model, num_rows = self.model, len(candidates)
        is_greedy = all(c.is_greedy for c in candidates)
        plain = model.full_pass([1] * num_rows, [c.context for c in candidates])
        plain += model.overhead(num_rows + num_plain, is_greedy)
        found = self._options(candidates, num_rows, num_plain)
        if "context" in self.chooses:
            self._trials.begin_decision(candidates)
            fixed = model.speculating_seconds(num_rows + num_plain, is_greedy)
            best = plan_by_routes(model, found, plain, fixed, num_plain, self.round_drafts)
            self.share = best.seconds / (num_rows + num_plain)
            columns = best.options
            has_seed = any(c.has_seed for c in candidates)
            if self._probe_is_due(best, plain) and not has_seed:
                columns = np.full(num_rows, -1)
                self.backoff.begin_probe()
            else:
                has_trials = self._try_again(best, columns, candidates, found, plain, num_plain)
                self.is_steady = not (has_trials or has_seed)
        else:
            columns, rates = best_alone(found, plain / num_rows)
            columns = np.where(np.isfinite(rates), columns, -1)
        chosen = [found.choice(row, column) for row, column in enumerate(columns)]
        rows = np.flatnonzero(columns >= 0)
        gained = found.tokens[np.arange(num_rows), columns]
        expected = np.where(columns >= 0, gained, 0.0).tolist()
        for row, candidate in enumerate(candidates):
            if candidate.has_seed:
                chosen[row] = self._fixed.choice(candidate)
        if len(rows) == sum(choice is not PLAIN for choice in chosen):
            self.planned = Planned.of(found, rows, columns[rows], candidates, model)
            self.planned.add(seconds_of_batch(model, found, columns, self.round_drafts))
        return chosen, expected

    def preview(self, candidate: Candidate) -> Choice:
        """What a new request alone would do, by the times measured so far."""
        found = self._options([candidate], 1, 0, self._optimistic_rates)
        best = plan(found, self.model.full_pass([1], [candidate.context]))
        return found.choice(0, best.options[0])

    def _options(
        self,
        candidates: Sequence[Candidate],
        num_sharing: int,
        num_plain: int,
        rates: Rates | None = None,
    ) -> Options:
        """
        Args:
            num_sharing: requests that propose: they share the passes of levels 1 and 2.
            rates: instead of what is known of the requests.
        """
        model, most = self.model, self.config.num_speculative_tokens
        num_reqs = len(candidates) + num_plain
        lengths: list[int] = []
        if "length" in self.chooses:
            measured = [q - 1 for q, _ in model.measured.full_by_tokens]
            lengths = [n for n in sorted({*_SHORT_LENGTHS, *measured}) if 0 < n <= most]
        # What a token adds to the linear part: the line from all plain to all at full length.
        longest = num_reqs * (most + 1)
        slope = self.slope = max(0.0, model.rows(longest) - model.rows(num_reqs)) / (
            longest - num_reqs
        )
        has_levels = self.config.levels != "1,3"
        sources = self.sources if "gamma" in self.chooses else []
        if not has_levels:
            sources = [self._preferred]
        greedy, sampled = (self.acceptance.gains_by_route(is_greedy) for is_greedy in (True, False))
        known = [rates or self.acceptance.of(c.request_id, c.is_greedy) for c in candidates]
        return build_options(
            model,
            candidates,
            known,
            [{} if rates else greedy if c.is_greedy else sampled for c in candidates],
            [0 if c.has_seed else min(c.most, most) for c in candidates],
            lengths,
            slope,
            model.company(num_reqs, num_sharing)[1],
            self.round_seconds(num_sharing),
            model.draft(num_sharing) / num_sharing,
            sources,
            has_levels,
            self.config.gamma if self._whole_rounds else 0,
        )

    def _try_again(
        self, best: Plan, columns, candidates, found: Options, plain: float, num_plain: int
    ) -> bool:
        """Adds trials, and says whether there are any; where nobody speculates even so, the batch
        rests."""
        budget = self._trials.budget
        budget.earn((1 + self._num_held) * best.seconds, plain)
        num_reqs, is_greedy = len(candidates) + num_plain, all(c.is_greedy for c in candidates)
        # The step that verifies a trial takes longer; the one after it is a re-evaluation.
        around = self.model.speculating_seconds(num_reqs, is_greedy)
        around += self.model.reevaluation_seconds(num_reqs, is_greedy)
        has_trials = self._trials.add(
            columns,
            candidates,
            found,
            lambda: self._options(candidates, 1, num_plain, self._optimistic_rates),
            plain,
            num_plain,
            self.model.error,
            around,
        )
        if (columns < 0).all():
            num_steps = self._steps_of_rest(candidates, num_plain, plain)
            budget.earn(num_steps * plain, plain)
            self.backoff.begin(num_steps)
        else:
            self.backoff.restart()
        return has_trials

    def _probe_is_due(self, best: Plan, plain: float) -> bool:
        """True if the baseline has not been timed for long.

        Speculation is compared with plain decoding: unseen, it could be overrated for long.
        """
        if best.is_plain:
            self._probed_at = self.backoff.step
            return False
        num_steps = self.backoff.step - self._probed_at
        lost_s = PROBE_STEPS * plain * (1 - 1 / best.speedup)
        if num_steps < _PROBE_AFTER or lost_s > TRIAL_SHARE * num_steps * best.seconds:
            return False
        self._probed_at = self.backoff.step
        return True

    def _steps_of_rest(self, candidates, num_plain: int, plain_seconds: float) -> int:
        """Until the next re-evaluation."""
        is_greedy = all(candidate.is_greedy for candidate in candidates)
        each = self.model.reevaluation_seconds(len(candidates) + num_plain, is_greedy)
        num_steps = self.backoff.next_rest(each, plain_seconds)
        for candidate in candidates:
            if candidate.has_seed:  # no rest may put off where its speculation begins
                num_steps = min(num_steps, max(1, self._fixed.tokens_until(candidate)))
        return num_steps

    def level1(
        self,
        request_id: str,
        has_seed: bool,
        confidence: Mapping[str, int],
        num_rows: int,
        most: int,
    ) -> tuple[str | None, int]:
        """Where the next tokens for level 2 come from, and how many.

        Args:
            confidence: of the sources that have tokens.
            num_rows: requests in this round.
            most: tokens that level 2 has room for.
        """
        if self.config.levels == "2,3":
            return None, 0
        if "gamma" not in self.chooses or has_seed:
            return self._fixed.level1(most)
        return self._level1.best(request_id, confidence, num_rows, most)

    def _adopt_measurements(self) -> None:
        count, self._num_decisions = self._num_decisions, self._num_decisions + 1
        if count % _ADOPT_EVERY == 0 or (count < _ADOPT_EVERY and count & (count - 1) == 0):
            self._decide_by(self._adopt())

    def _decide_by(self, model: CostModel) -> None:
        self.model = model
        self._level1.adopt(model)
