"""Verification of level 1's tokens by level 2: accept, recover, or add a bonus token.

Speculative sampling (arXiv 2211.17192), with the residual distribution on rejection. The
published TriForce code draws the recovered token from level 2's distribution itself and still
passes that distribution to level 3, which biases the output.
"""

from dataclasses import dataclass, field

import torch

from vllm_triforce.runner_v1.sampling import (
    NAN_TOKEN,
    InnerNoise,
    SamplingRows,
    greedy_tokens,
    has_nan,
    token_distribution,
)


@dataclass
class Verified:
    """Tokens that a round adds to the proposal: at least one per row without a NaN."""

    token_ids: list[list[int]] = field(default_factory=list)
    probs: list[list[torch.Tensor]] = field(default_factory=list)
    """Level 2's distribution at each token, [vocab_size]; empty lists if all rows are greedy."""
    num_accepted: list[int] = field(default_factory=list)
    nan_rows: list[int] = field(default_factory=list)
    """Rows with a NaN in their logits. They end before it."""

    def add_row(
        self, token_ids: list[int], probs: list[torch.Tensor], num_accepted: int, has_nan: bool
    ) -> None:
        if has_nan:
            self.nan_rows.append(len(self.token_ids))
        self.token_ids.append(token_ids)
        self.probs.append(probs)
        self.num_accepted.append(num_accepted)


def verify(
    drafts: list[list[int]],
    draft_probs: list[list[torch.Tensor] | None] | None,
    logits: torch.Tensor,  # [sum(len(tokens) + 1 for tokens in drafts), vocab_size], of level 2
    sampling: SamplingRows,  # [num_rows]
    noise: InnerNoise,
    synthetic_rate: float | None = None,
) -> Verified:
    """Accept a prefix of each row's draft tokens and add one token.

    Args:
        drafts: level 1's tokens, one list per row.
        draft_probs: [vocab_size], per row and token, the distribution it was drawn from. None, for
            a row or for all rows, if the distributions are one-hot.
        synthetic_rate: probability of accepting any token, for benchmarks; None for the rule above.
    """
    if synthetic_rate is not None or sampling.all_greedy:
        return _verify_argmax(drafts, greedy_tokens(logits).tolist(), synthetic_rate, noise)
    lengths = [len(tokens) + 1 for tokens in drafts]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    probs = token_distribution(logits, sampling.take(owners))
    is_nan, result = has_nan(probs), Verified()
    for row, (tokens, target_probs) in enumerate(zip(drafts, probs.split(lengths))):
        row_is_nan, is_nan = is_nan[: lengths[row]], is_nan[lengths[row] :]
        num_right = (*row_is_nan, True).index(True)
        q = None if draft_probs is None else draft_probs[row]
        token_ids = verify_row(tokens[:num_right], q, target_probs[:num_right], row, noise)
        num_accepted = _num_equal(tokens, token_ids)
        row_probs = list(target_probs[: len(token_ids)])
        result.add_row(token_ids, row_probs, num_accepted, any(row_is_nan))
    return result


def verify_row(
    tokens: list[int],
    draft_probs: list[torch.Tensor] | None,  # [vocab_size] per token; None for one-hot
    target_probs: torch.Tensor,  # [len(tokens) + 1, vocab_size], or one less before a NaN
    row: int,
    noise: InnerNoise,
) -> list[int]:
    """Return the accepted prefix of ``tokens`` and the recovered or bonus token."""
    for place, token in enumerate(tokens):
        target = target_probs[place]
        draft = None if draft_probs is None else draft_probs[place]
        draft_prob = 1.0 if draft is None else float(draft[token])
        if noise.uniform(row) * draft_prob < float(target[token]):
            continue
        return [*tokens[:place], noise.sample(row, residual(target, draft, token))]
    if len(target_probs) == len(tokens):
        # Accepted tokens stay: whether one is dropped must not depend on those after it.
        return tokens
    return [*tokens, noise.sample(row, target_probs[len(tokens)])]


def residual(
    target: torch.Tensor,  # [vocab_size]
    draft: torch.Tensor | None,  # [vocab_size]; None: one-hot at ``token``
    token: int,
) -> torch.Tensor:  # [vocab_size], not normalised
    """Compute max(target - draft, 0), the distribution after ``token`` was rejected."""
    if draft is None:
        remainder = target.clone()
        remainder[token] = 0
    else:
        remainder = (target - draft).clamp_(min=0)
    # It is empty if both are equal up to rounding: the rejection is the rounding error.
    return remainder if bool(remainder.any()) else target


def _verify_argmax(
    drafts: list[list[int]], best: list[int], synthetic_rate: float | None, noise: InnerNoise
) -> Verified:
    """Accept draft tokens while they equal level 2's argmax, or at a rate, and add the argmax.

    On lists: tensors would be slower.
    """
    result, start = Verified(), 0
    for row, tokens in enumerate(drafts):
        argmax = best[start : start + len(tokens) + 1]
        start += len(argmax)
        if synthetic_rate is None:
            count = _num_equal(tokens, argmax)
        else:
            accepts = [
                target != NAN_TOKEN and noise.uniform(row) < synthetic_rate
                for target in argmax[:-1]
            ]
            count = (*accepts, False).index(False)
        emitted = tokens[:count]
        if argmax[count] != NAN_TOKEN:
            emitted.append(argmax[count])
        result.add_row(emitted, [], count, NAN_TOKEN in argmax)
    return result


def _num_equal(tokens: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    agrees = [token == other for token, other in zip(tokens, others)]
    return (*agrees, False).index(False)
