"""A round of level 1 and level 2: how many tokens level 1 should draft for it.

Where level 1 takes the next tokens for level 2 from, and how many.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.routes import SourceTraits


class InnerRounds:
    """Rounds of so many requests.

    Args:
        most: tokens of level 1 to be considered at most.
    """

    def __init__(self, model: CostModel, num_rows: int, most: int, is_greedy: bool) -> None:
        lengths = range(most + 1)
        tested = [
            model.level2(num_rows, n + 1) + model.test_seconds(num_rows * (n + 1), is_greedy)
            for n in lengths
        ]
        free = np.array(tested)
        passes = model.draft(num_rows) * np.arange(most + 1)
        self._seconds = {False: free, True: free + passes}

    def best(self, rate: float, most: int, takes_passes: bool) -> tuple[int, float]:
        """How many tokens a source is worth asking for, for a pass of level 2.

        Args:
            rate: level 2's acceptance.
            takes_passes: whether each takes a pass of the draft model.

        Returns:
            The number, 0 where level 2 is better off alone, and tokens per second of such rounds.
        """
        speeds = (1 + expected_by_length(rate, most)) / self._seconds[takes_passes][: most + 1]
        best = int(speeds.argmax())
        return best, float(speeds[best])


class DraftLengths:
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
