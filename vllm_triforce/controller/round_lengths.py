"""Rounds that are made for the whole batch at once (Model Runner V2): how long proposals may be."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from vllm_triforce.controller.acceptance import expected_by_length
from vllm_triforce.controller.controller import Controller
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.options import Candidate
from vllm_triforce.controller.routes import LEVELS, Choice

_STEPS = 20  # in which tokens of a round are told apart, for each


def extend_to_shared_rounds(
    controller: Controller,
    candidates: Sequence[Candidate],
    chosen: list[Choice],
    rounds: Sequence[int],
) -> list[Choice]:
    """What each candidate does, where all that were chosen to go through the levels take part in as
    many rounds as any of them needs. That takes longer than their own rounds come to, and later
    plans expect it.

    Args:
        chosen: by ``controller.choose()``, just now.
        rounds: that each needs.
    """
    planned, model = controller.planned, controller.model
    if planned is None or model is None:
        return chosen
    batch = BatchOfRounds(controller, model, chosen, rounds)
    settled = batch.lengthen(candidates, chosen)
    for candidate, before, after in zip(candidates, chosen, settled):
        if grown := after.num_tokens - before.num_tokens:
            planned.add(grown * batch.pass_seconds(candidate, before.num_tokens), grown)
    return settled


class BatchOfRounds:
    """The rounds of one step."""

    def __init__(
        self,
        controller: Controller,
        model: CostModel,
        chosen: Sequence[Choice],
        rounds: Sequence[int],
    ) -> None:
        self._controller, self._model = controller, model
        own = [n for n, choice in zip(rounds, chosen) if choice.route == LEVELS]
        self._num_rounds = max(own)
        self._company = model.company(len(own), len(own))[1]

    def lengthen(self, candidates: Sequence[Candidate], chosen: Sequence[Choice]) -> list[Choice]:
        """Proposals that end where the rounds end, as far as that pays."""
        return [
            self._longer(candidate, choice)
            if choice.route == LEVELS and not candidate.has_seed
            else choice
            for candidate, choice in zip(candidates, chosen)
        ]

    def _longer(self, candidate: Candidate, choice: Choice) -> Choice:
        controller, name = self._controller, candidate.request_id
        rates = controller.acceptance.of(name, candidate.is_greedy)
        _, gained = controller.chosen_for(name)
        length = lengthened(
            choice.num_tokens,
            min(candidate.most, controller.config.num_speculative_tokens),
            self._num_rounds,
            rates.round_tokens,
            controller.config.gamma,
            rates.level2.value,
            # As the planner weighs: a request's tokens against everybody's waiting.
            controller.share / (1 + gained) / self._place_seconds(candidate, choice.num_tokens),
        )
        return replace(choice, num_tokens=length)

    def pass_seconds(self, candidate: Candidate, num_tokens: int) -> float:
        """What one token more takes of the full pass."""
        model, context = self._model, candidate.context
        read = model.attention(num_tokens + 2, context) - model.attention(num_tokens + 1, context)
        return self._controller.slope + self._company * max(0.0, read)

    def _place_seconds(self, candidate: Candidate, num_tokens: int) -> float:
        """What verifying one token more takes."""
        drafts = self._model.draft_seconds(candidate.is_greedy)
        return max(drafts + self.pass_seconds(candidate, num_tokens), 1e-9)


def lengthened(
    num_tokens: int,
    most: int,
    num_rounds: int,
    round_tokens: float,
    gamma: int,
    acceptance: float,
    worth: float,
) -> int:
    """Tokens that a request is planned to propose where its number of rounds is settled.

    Rounds give unequally many tokens. A proposal that ends at the mean loses what lucky rounds
    would have added, and they are made all the same; what is planned and not proposed only takes
    its place in the full pass.

    Args:
        num_tokens: planned so far.
        most: that it may propose.
        round_tokens: that a round gives on average, 1 to ``gamma + 1``.
        acceptance: of a token by the full pass.
        worth: of a token that is emitted, over what a place in the full pass costs.
    """
    reached = _reached(num_rounds, round(_STEPS * round_tokens), gamma)
    while num_tokens < min(most, len(reached) - 1):
        if reached[num_tokens + 1] * acceptance ** (num_tokens + 1) * worth < 1:
            break
        num_tokens += 1
    return num_tokens


@lru_cache(maxsize=4096)
def _reached(num_rounds: int, steps: int, gamma: int) -> np.ndarray:
    """[num_rounds * (gamma + 1) + 1], the chance that rounds give at least so many tokens, where
    each gives ``steps / _STEPS`` on average."""
    rates = np.linspace(0, 1, 101)
    expected = 1 + expected_by_length(rates[:, None], gamma)[:, gamma]
    rate = np.interp(steps / _STEPS, expected, rates)  # level 1's acceptance
    of_one = np.array([0.0, *(rate**n * (1 - rate) for n in range(gamma)), rate**gamma])
    total = np.ones(1)
    for _ in range(num_rounds):
        total = np.convolve(total, of_one)
    return total[::-1].cumsum()[::-1]
