"""Two-level speculative sampling written for reading: the exact distribution it emits.

Nothing here is used to serve requests. ``emitted_distribution`` enumerates one round of
drafting and inner verification over a small vocabulary; the tests compare it with level 2's
distribution and with what the sampler draws.
"""

from collections.abc import Callable
from itertools import product

import torch

# (level 1's, level 2's) distribution -> distribution of the recovered token
Recover = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def recover_from_residual(p1: torch.Tensor, p2: torch.Tensor) -> torch.Tensor:
    """norm(max(p2 - p1, 0)): right."""
    residual = (p2 - p1).clamp(min=0)
    total = residual.sum()
    return residual / total if total > 0 else p2


def recover_from_target(p1: torch.Tensor, p2: torch.Tensor) -> torch.Tensor:
    """p2: what the paper's published code does, and wrong."""
    return p2


def emitted_distribution(
    level1: Callable[[tuple[int, ...]], torch.Tensor],
    level2: Callable[[tuple[int, ...]], torch.Tensor],
    vocab_size: int,
    gamma: int,
    recover: Recover = recover_from_residual,
) -> dict[tuple[int, ...], float]:
    """Probability of every token sequence that one inner round can emit.

    Args:
        level1, level2: map the tokens so far to a distribution, [vocab_size].
        gamma: drafted tokens.

    Returns:
        Emitted sequence (1 to gamma + 1 tokens) -> probability.
    """
    emitted: dict[tuple[int, ...], float] = {}

    def add(sequence: tuple[int, ...], probability: float) -> None:
        emitted[sequence] = emitted.get(sequence, 0.0) + probability

    for drafted in product(range(vocab_size), repeat=gamma):
        # Probability that level 1 drafts this and that all tokens so far were accepted.
        reached = 1.0
        for place, token in enumerate(drafted):
            prefix = drafted[:place]
            p1, p2 = level1(prefix), level2(prefix)
            reached_and_drafted = reached * float(p1[token])
            accept = min(1.0, float(p2[token] / p1[token])) if p1[token] > 0 else 0.0
            # The rejection here is shared by all drafts with this prefix and token: count it
            # once, at the draft whose later tokens are all zero.
            if not any(drafted[place + 1 :]):
                recovered = recover(p1, p2)
                for new in range(vocab_size):
                    add((*prefix, new), reached_and_drafted * (1 - accept) * float(recovered[new]))
            reached = reached_and_drafted * accept
        for new in range(vocab_size):
            add((*drafted, new), reached * float(level2(drafted)[new]))
    return emitted


def marginal_of_token(
    emitted: dict[tuple[int, ...], float], prefix: tuple[int, ...], vocab_size: int
) -> torch.Tensor:  # [vocab_size]
    """Distribution of the token after ``prefix``, given that one is emitted there."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for sequence, probability in emitted.items():
        if len(sequence) > len(prefix) and sequence[: len(prefix)] == prefix:
            mass[sequence[len(prefix)]] += probability
    return mass / mass.sum()
