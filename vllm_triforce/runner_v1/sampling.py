"""Sampling parameters of the rows of a proposal, applied to the logits of levels 1 and 2."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_triforce.core.limits import GREEDY_EPSILON

# Stands for a token where the logits have a NaN: no token can be chosen from them.
NAN_TOKEN = -1


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


def softmax(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """Compute probabilities that are equal bit by bit on all ranks of a tensor-parallel group.

    All decisions about tokens are made from these, as each rank makes them by itself, and ranks
    that decided differently would wait for each other's passes. Torch computes a row of softmax on
    one thread. Other sums over a row, as of ``logsumexp()``, depend on the number of threads.
    """
    return logits.softmax(-1, dtype=torch.float32)


def greedy_tokens(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
) -> torch.Tensor:  # [num_tokens], int64
    """Return the argmax of each row, ``NAN_TOKEN`` for rows with a NaN.

    Torch's maximum of a row with a NaN is NaN, so no second pass over the logits is needed.
    """
    best, tokens = logits.max(-1)
    return tokens.masked_fill(best.isnan(), NAN_TOKEN)


def has_nan(
    probs: torch.Tensor,  # [num_tokens, vocab_size], by token_distribution()
) -> list[bool]:  # [num_tokens]
    """True for each row from logits with a NaN: softmax spreads a NaN over the whole row."""
    return probs[:, 0].isnan().tolist()


def token_distribution(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    sampling: SamplingRows,  # [num_tokens]
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """Compute the distribution that each row is sampled from; one-hot for greedy rows.

    Rows with a NaN are NaN throughout. Temperature, min-p, top-k and top-p are applied in vLLM's
    order (vllm/v1/sample/sampler.py), so that level 2's tokens are among those level 3 keeps.
    """
    greedy = sampling.is_greedy
    has_greedy = bool(greedy.any())
    temperature = sampling.temperature
    if has_greedy:
        temperature = torch.where(greedy, torch.ones_like(temperature), temperature)
    scaled = logits.float() / temperature[:, None]
    if sampling.min_p is not None:
        probs = softmax(scaled)
        floor = probs.amax(-1, keepdim=True) * sampling.min_p[:, None]
        scaled = scaled.masked_fill(probs < floor, float("-inf"))
    probs = softmax(apply_top_k_top_p(scaled, sampling.top_k, sampling.top_p))
    if has_greedy:
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
        best.masked_fill_(probs[:, :1].isnan(), float("nan"))
        probs = torch.where(greedy[:, None], best, probs)
    return probs
