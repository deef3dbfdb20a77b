"""What is kept of the keys of a retrieval chunk, so that scoring it need not read them."""

from enum import StrEnum

import torch


class Summary(StrEnum):
    """A key that stands for those of a chunk, one number for each head dimension."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    def of(self, keys: torch.Tensor, dim: int) -> torch.Tensor:
        """In float32, of keys [..., tokens or head_dim, ...], without the axis ``dim``."""
        if self is Summary.MEAN:
            return keys.mean(dim, dtype=torch.float32)
        return (keys.amin(dim) if self is Summary.MIN else keys.amax(dim)).float()
