"""Attention of one KV head's group over a part of the context, in plain PyTorch.

Readable rather than fast: one expression serves the full pass, every policy, soft-capped scores
and attention sinks, so that two policies that read the same tokens agree bit for bit.
"""

import torch

from vllm_triforce_bench.lab.trace import AttentionOptions


def attention_scores(
    query: torch.Tensor,  # [group, num_queries, head_dim]
    keys: torch.Tensor,  # [num_tokens, head_dim]
    options: AttentionOptions,
) -> torch.Tensor:  # [group, num_queries, num_tokens], float32
    return _squeeze(torch.matmul(query, keys.t()).float(), options)


def own_scores(
    query: torch.Tensor,  # [group, num_queries, head_dim]
    own_keys: torch.Tensor,  # [num_queries, head_dim]
    options: AttentionOptions,
) -> torch.Tensor:  # [group, num_queries], float32
    """The score of each query with the key of its own token."""
    return _squeeze((query * own_keys).sum(-1, dtype=torch.float32), options)


def _squeeze(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    scores.mul_(options.scaling)
    if options.softcap is not None:
        scores = torch.tanh_(scores.div_(options.softcap)).mul_(options.softcap)
    return scores


def causal_mask(
    positions: torch.Tensor,  # [num_queries]
    num_tokens: int,
    window: int | None = None,
) -> torch.Tensor:  # [num_queries, num_tokens], True where the query may look
    columns = torch.arange(num_tokens, device=positions.device)
    mask = columns <= positions[:, None]
    if window is not None:
        mask &= columns > positions[:, None] - window
    return mask


def attention_weights(
    scores: torch.Tensor,  # [group, num_queries, num_tokens], -inf where a query may not look
    sinks: torch.Tensor | None,  # [group]
) -> torch.Tensor:  # [group, num_queries, num_tokens]
    """Softmax; sinks take their share of it. Every query sees a token at least."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def kept_mass(
    scores: torch.Tensor,  # [group, num_queries, num_tokens]
    visible: torch.Tensor,  # [num_queries, num_tokens]
    kept: torch.Tensor,  # [1 or group, num_queries, num_tokens], of the visible
) -> torch.Tensor:  # [group, num_queries], between 0 and 1
    """Share of full attention's softmax that falls on the kept tokens."""
    hidden = float("-inf")
    everything = scores.masked_fill(~visible, hidden).logsumexp(-1)
    part = scores.masked_fill(~kept, hidden).logsumexp(-1)
    return (part - everything).exp().clamp_(max=1.0)
