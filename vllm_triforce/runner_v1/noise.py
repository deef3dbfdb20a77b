"""Random numbers of levels 1 and 2: independent of level 3's, reproducible per seed."""

import hashlib

import torch


class InnerNoise:
    """Uniform random numbers for the rows of one round.

    Level 3 draws from vLLM's generators. If its numbers were used here too, acceptance would
    depend on how a token was drafted. Unseeded requests share a private generator. A seeded request
    gets a generator per round, derived from its seed and its place in the sequence, so that its
    numbers do not depend on the other requests of the batch.
    """

    def __init__(self, engine_seed: int | None, device: torch.device, replica: int = 0) -> None:
        """Create the shared generator.

        Args:
            engine_seed: seed of vLLM's configuration, the same for all ranks and replicas.
            replica: index of the engine in a data-parallel deployment. Replicas draw different
                numbers; the ranks of one engine draw the same.
        """
        self._device = device
        self._shared = torch.Generator(device)
        self._shared.manual_seed(_mix("engine", engine_seed, replica))
        self._rows: list[torch.Generator] = []

    def begin(self, seeds: list[int | None], places: list[tuple[int, int]]) -> None:
        """Start a round.

        Args:
            seeds: seed of each row; may be empty if no request has one.
            places: number of computed tokens and length of the proposal, per row. Two rounds of a
                request share a place only if the first round's tokens were discarded. The lengths
                of a seeded request do not depend on anything learned from those tokens.
        """
        self._rows = [self._shared] * len(places)
        for row, seed in enumerate(seeds):
            if seed is not None:
                generator = torch.Generator(self._device)
                generator.manual_seed(_mix("request", seed, *places[row]))
                self._rows[row] = generator

    def uniform(self, row: int) -> float:
        """Draw from [0, 1)."""
        generator = self._rows[row]
        return torch.rand((), generator=generator, device=self._device, dtype=torch.float64).item()

    def sample(
        self,
        row: int,
        probs: torch.Tensor,  # [vocab_size], need not be normalised
    ) -> int:
        """Draw a token by the inverse of the cumulative distribution."""
        sums = probs.cumsum(0, dtype=torch.float64)
        token = int(torch.searchsorted(sums, self.uniform(row) * float(sums[-1]), right=True))
        if token == len(sums):  # the product was rounded up to the sum itself
            token = int(probs.nonzero()[-1])
        return token


def _mix(*parts) -> int:
    """Hash ``parts`` to a seed of 63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"triforce")
    return int.from_bytes(digest.digest(), "little") >> 1
