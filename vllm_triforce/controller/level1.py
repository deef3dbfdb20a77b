"""Where level 1 takes the next tokens for level 2 from, and how many."""

from collections.abc import Mapping, Sequence

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.inner_rounds import InnerRounds
from vllm_triforce.controller.source_traits import SourceTraits


class Level1Choices:
    """The source whose rounds give most tokens per second.

    Args:
        sources: in the order in which they win where they promise the same.
    """

    def __init__(
        self, config: ResolvedConfig, sources: Sequence[SourceTraits], acceptance: Acceptance
    ) -> None:
        self._config = config
        self._sources = sources
        self._acceptance = acceptance
        self._model: CostModel | None = None
        self._rounds: dict[tuple[int, bool], InnerRounds] = {}

    def adopt(self, model: CostModel) -> None:
        """Chooses by these times from now on."""
        self._model = model
        self._rounds.clear()

    def best(
        self, request_id: str, confidence: Mapping[str, int], num_rows: int, most: int
    ) -> tuple[str | None, int]:
        """
        Args:
            confidence: of the sources that have tokens.
            num_rows: requests in this round.
            most: tokens that level 2 has room for.
        """
        rates, is_greedy = self._acceptance.of(request_id), self._acceptance.is_greedy(request_id)
        rounds = self._rounds_of(num_rows, is_greedy)
        best: tuple[str | None, int] = None, 0
        best_speed = 0.0
        for source in self._sources:
            found = source.confidence(confidence)
            if found is None:
                continue
            longest = min(self._config.gamma, most) if source.takes_passes else most
            rate = rates.of(source.name, True, found).value
            count, speed = rounds.best(rate, longest, source.takes_passes)
            if speed > best_speed:
                best, best_speed = (source.name, count), speed
        return best

    def _rounds_of(self, num_rows: int, is_greedy: bool) -> InnerRounds:
        key = num_rows, is_greedy
        if key not in self._rounds:
            most = self._config.num_speculative_tokens
            self._rounds[key] = InnerRounds(self._model, num_rows, most, is_greedy)
        return self._rounds[key]
