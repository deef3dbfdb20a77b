"""Level 2's test of level 1's tokens: accept, recover, or add the bonus token.

Speculative sampling (arXiv 2211.17192), with the residual distribution on rejection. The
published TriForce code draws the recovered token from level 2's distribution itself and
still declares that distribution to level 3, which bends the output.
"""

from dataclasses import dataclass, field

import torch

from vllm_triforce.core.sampling import SamplingRows
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sampling import (
    NAN_TOKEN,
    greedy_tokens,
    has_nan,
    token_distribution,
)


@dataclass
class Verified:
    """What a round adds to the proposal, a list per row of one token at least."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor]]
    """Level 2's distribution, which each token is distributed as; empty lists when greedy."""
    num_accepted: list[int]
    nan_rows: list[int] = field(default_factory=list)
    """Rows whose logits have a NaN; nothing is added to them."""


def verify(
    drafted: list[list[int]],
    drafted_probs: list[list[torch.Tensor] | None] | None,
    logits: torch.Tensor,  # [sum(len(drafted) + 1), vocab_size], level 2's, row after row
    sampling: SamplingRows,  # [num_rows]
    noise: InnerNoise,
) -> Verified:
    """Accepts a prefix of each row's drafted tokens and adds one token.

    Args:
        drafted: level 1's tokens, a list per row.
        drafted_probs: what each was drawn from, [vocab_size]; None, as a whole or for a row,
            where each was certain.
    """
    lengths = [len(tokens) + 1 for tokens in drafted]
    if sampling.all_greedy:
        return _verify_greedy(drafted, greedy_tokens(logits).tolist(), lengths)
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    probs = token_distribution(logits, sampling.take(owners))
    nan_rows = {owner for owner, nan in zip(owners, has_nan(probs)) if nan}
    target = probs.split(lengths)
    result = Verified([], [], [], sorted(nan_rows))
    for row, tokens in enumerate(drafted):
        if row in nan_rows:
            _add_nothing(result)
            continue
        row_probs = None if drafted_probs is None else drafted_probs[row]
        kept = verify_row(tokens, row_probs, target[row], row, noise)
        result.token_ids.append(kept)
        result.probs.append(list(target[row][: len(kept)]))
        result.num_accepted.append(len(kept) - 1)
    return result


def verify_row(
    tokens: list[int],
    draft_probs: list[torch.Tensor] | None,  # per token [vocab_size]; None: each was certain
    target_probs: torch.Tensor,  # [len(tokens) + 1, vocab_size]
    row: int,
    noise: InnerNoise,
) -> list[int]:
    """The accepted prefix of ``tokens`` and the recovered or bonus token."""
    for place, token in enumerate(tokens):
        target = target_probs[place]
        drafted_with = 1.0 if draft_probs is None else float(draft_probs[place][token])
        if noise.uniform(row) * drafted_with < float(target[token]):
            continue
        drafted_from = None if draft_probs is None else draft_probs[place]
        return [*tokens[:place], noise.sample(row, residual(target, drafted_from, token))]
    return [*tokens, noise.sample(row, target_probs[len(tokens)])]


def residual(
    target: torch.Tensor,  # [vocab_size]
    draft: torch.Tensor | None,  # [vocab_size]; None: the token was certain
    token: int,
) -> torch.Tensor:  # [vocab_size], not normalised
    """max(target - draft, 0): what is drawn from after ``token`` was rejected."""
    if draft is None:
        remainder = target.clone()
        remainder[token] = 0
    else:
        remainder = (target - draft).clamp_(min=0)
    # Nothing is left where both are equal up to rounding: the rejection is the rounding error.
    return remainder if bool(remainder.any()) else target


def _add_nothing(result: Verified) -> None:
    result.token_ids.append([])
    result.probs.append([])
    result.num_accepted.append(0)


def _verify_greedy(drafted: list[list[int]], best: list[int], lengths: list[int]) -> Verified:
    result = Verified([], [], [])
    start = 0
    for row, (tokens, length) in enumerate(zip(drafted, lengths)):
        argmax = best[start : start + length]
        start += length
        if NAN_TOKEN in argmax:
            result.nan_rows.append(row)
            _add_nothing(result)
            continue
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == argmax[accepted]:
            accepted += 1
        result.token_ids.append([*tokens[:accepted], argmax[accepted]])
        result.probs.append([])
        result.num_accepted.append(accepted)
    return result
