"""A round of level 1 and level 2: how many tokens level 1 should draft for it."""

import numpy as np

from vllm_triforce.controller.acceptance import expected_by_length
from vllm_triforce.controller.cost_model import CostModel


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
        self._lookup_seconds = np.array(tested)
        self._draft_seconds = self._lookup_seconds + model.draft(num_rows) * np.arange(most + 1)

    def best_gamma(self, rate: float, most: int) -> tuple[int, float]:
        """How many tokens the draft is worth asking for, for a pass of level 2.

        Args:
            rate: level 2's acceptance.

        Returns:
            The number, 0 where level 2 is better off alone, and tokens per second of such rounds.
        """
        return _best(rate, self._draft_seconds[: most + 1])

    def best_lookup(self, rate: float, most: int) -> tuple[int, float]:
        """How many looked-up tokens a pass of level 2 should test; as ``best_gamma``."""
        return _best(rate, self._lookup_seconds[: most + 1])


def _best(rate: float, seconds: np.ndarray) -> tuple[int, float]:
    speeds = (1 + expected_by_length(rate, len(seconds) - 1)) / seconds
    best = int(speeds.argmax())
    return best, float(speeds[best])
