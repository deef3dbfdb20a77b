"""Randomness of the inner levels: independent of the outer test's, reproducible per seed."""

import hashlib

import torch


class InnerNoise:
    """Uniform noise for the rows of one inner round.

    The outer test draws from vLLM's generators. Were its noise used here too, accepting would
    depend on how a token was drafted. Unseeded requests share a private generator; a seeded
    one gets a generator per round, derived from its seed and its place in the sequence, so
    that its noise does not depend on the requests beside it.
    """

    def __init__(self, engine_seed: int | None, device: torch.device, replica: int = 0) -> None:
        """Args:
        engine_seed: of vLLM's configuration, the same for all ranks and replicas.
        replica: index among the engines of a data-parallel deployment; each draws its own noise,
            while the ranks of one engine draw alike.
        """
        self._device = device
        self._shared = torch.Generator(device)
        self._shared.manual_seed(_mix("engine", engine_seed, replica))
        self._rows: list[torch.Generator] = []

    def begin(self, seeds: list[int | None], places: list[tuple[int, int]]) -> None:
        """Starts a round.

        Args:
            seeds: each row's seed; may be empty, where no request has one.
            places: each row's number of computed tokens and length of its proposal. Two rounds
                of a request share one only if the first's tokens were discarded: a seeded
                request's lengths depend on nothing that was learnt from them.
        """
        self._rows = [self._shared] * len(places)
        for row, seed in enumerate(seeds):
            if seed is not None:
                generator = torch.Generator(self._device)
                generator.manual_seed(_mix("request", seed, *places[row]))
                self._rows[row] = generator

    def uniform(self, row: int) -> float:
        """From [0, 1)."""
        generator = self._rows[row]
        return torch.rand((), generator=generator, device=self._device, dtype=torch.float64).item()

    def sample(
        self,
        row: int,
        probs: torch.Tensor,  # [vocab_size], need not be normalised
    ) -> int:
        """A token, by the inverse of the cumulative distribution."""
        sums = probs.cumsum(0, dtype=torch.float64)
        token = int(torch.searchsorted(sums, self.uniform(row) * float(sums[-1]), right=True))
        if token == len(sums):  # the product was rounded up to the sum itself
            token = int(probs.nonzero()[-1])
        return token


def _mix(*parts) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"triforce")
    return int.from_bytes(digest.digest(), "little") >> 1
