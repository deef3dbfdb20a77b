"""Sampling parameters of the requests in a round."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

# As _SAMPLING_EPS in vllm/v1/sample/sampler.py.
GREEDY_EPSILON = 1e-5


@dataclass
class SamplingRows:
    """Sampling parameters, a row per request."""

    temperature: torch.Tensor  # [num_reqs], float32; 0 is greedy
    top_k: torch.Tensor | None = None  # [num_reqs], int
    top_p: torch.Tensor | None = None  # [num_reqs], float32
    min_p: torch.Tensor | None = None  # [num_reqs], float32
    seeds: list[int | None] = field(default_factory=list)
    """[num_reqs], the seed that each draws by."""

    @cached_property
    def all_greedy(self) -> bool:
        return bool((self.temperature < GREEDY_EPSILON).all())

    @property
    def is_greedy(self) -> torch.Tensor:  # [num_reqs], bool
        return self.temperature < GREEDY_EPSILON

    def take(self, rows: list[int]) -> "SamplingRows":
        """The parameters of some rows, in their order; rows may repeat."""
        if rows == list(range(len(self.temperature))):
            return self
        index = torch.tensor(rows, device=self.temperature.device)

        def pick(values):
            return None if values is None else values.index_select(0, index)

        return SamplingRows(
            pick(self.temperature),
            pick(self.top_k),
            pick(self.top_p),
            pick(self.min_p),
            [self.seeds[row] for row in rows] if self.seeds else [],
        )
