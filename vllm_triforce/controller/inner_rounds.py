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
