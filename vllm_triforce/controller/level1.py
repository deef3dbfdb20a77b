"""Where level 1 takes the next tokens for level 2 from, and how many."""

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance, match_index
from vllm_triforce.controller.choice import Route
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.inner_rounds import InnerRounds


class Level1Choices:
    """The source whose rounds give most tokens per second.

    Args:
        has_draft: whether there is a draft model beside prompt lookup.
    """

    def __init__(self, config: ResolvedConfig, has_draft: bool, acceptance: Acceptance) -> None:
        self._config = config
        self._has_draft = has_draft
        self._acceptance = acceptance
        self._model: CostModel | None = None
        self._rounds: dict[tuple[int, bool], InnerRounds] = {}

    def adopt(self, model: CostModel) -> None:
        """Chooses by these times from now on."""
        self._model = model
        self._rounds.clear()

    def best(
        self, request_id: str, match_length: int, num_rows: int, most: int
    ) -> tuple[Route, int]:
        """
        Args:
            match_length: of what prompt lookup found.
            num_rows: requests in this round.
            most: tokens that level 2 has room for.
        """
        rates, is_greedy = self._acceptance.of(request_id), self._acceptance.is_greedy(request_id)
        rounds = self._rounds_of(num_rows, is_greedy)
        source, best, best_speed = Route.PLAIN, 0, 0.0
        if match_length:
            rate = rates.lookup[match_index(match_length)].value
            source, (best, best_speed) = Route.LOOKUP, rounds.best_lookup(rate, most)
        if self._has_draft:
            gamma, speed = rounds.best_gamma(rates.draft.value, min(self._config.gamma, most))
            if speed > best_speed:
                source, best = Route.DRAFT, gamma
        return source, best

    def _rounds_of(self, num_rows: int, is_greedy: bool) -> InnerRounds:
        key = num_rows, is_greedy
        if key not in self._rounds:
            most = self._config.num_speculative_tokens
            self._rounds[key] = InnerRounds(self._model, num_rows, most, is_greedy)
        return self._rounds[key]
