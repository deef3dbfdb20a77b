"""Sampling parameters of the rows of a proposal."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

# Same as _SAMPLING_EPS in vllm/v1/sample/sampler.py.
GREEDY_EPSILON = 1e-5


@dataclass
class SamplingRows:
    """Sampling parameters, one row per request."""

    temperature: torch.Tensor  # [num_reqs], float32; 0 is greedy
    top_k: torch.Tensor | None = None  # [num_reqs], int
    top_p: torch.Tensor | None = None  # [num_reqs], float32
    min_p: torch.Tensor | None = None  # [num_reqs], float32
    seeds: list[int | None] = field(default_factory=list)
    """[num_reqs], seed of each request or None; may be empty if no request has one."""

    @cached_property
    def all_greedy(self) -> bool:
        """True if every row is greedy."""
        return bool((self.temperature < GREEDY_EPSILON).all())

    @property
    def is_greedy(self) -> torch.Tensor:  # [num_reqs], bool
        """True for each greedy row."""
        return self.temperature < GREEDY_EPSILON

    def take(self, rows: list[int]) -> "SamplingRows":
        """Return the parameters of ``rows``, in this order. Rows may repeat."""
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
