"""A recorded context: keys and values of each layer, and attention over them.

Attention is plain PyTorch, readable rather than fast. One expression serves the full pass and every
policy, with soft caps and attention sinks: policies that read the same tokens agree bit for bit.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a model's attention.

    Args:
        softcap: bound of the scores (Gemma 2).
        sinks: [num_heads], learned scores that take part in the softmax alone (gpt-oss).
        window: tokens of a sliding window, the newest included; such layers stay dense.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None


@dataclass
class LayerTrace:
    """One layer of a recorded context of ``start + num_replayed`` tokens.

    Args:
        group: query heads of a KV head.
        start: position of the first replayed token, the prompt's length.
    """

    keys: torch.Tensor  # [num_kv_heads, num_tokens, head_dim], RoPE applied
    values: torch.Tensor  # [num_kv_heads, num_tokens, value_dim]
    group: int
    start: int
    options: AttentionOptions

    @property
    def num_replayed(self) -> int:
        return self.num_tokens - self.start

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    def heads(self, kv_head: int) -> slice:
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def positions(self) -> torch.Tensor:  # [num_replayed]
        return torch.arange(self.start, self.num_tokens, device=self.keys.device)

    def sinks(self, kv_head: int) -> torch.Tensor | None:  # [group]
        sinks = self.options.sinks
        return None if sinks is None else sinks[self.heads(kv_head)]


@dataclass
class Trace:
    """All layers of a recorded context, and the token ids replayed from position ``start`` on."""

    layers: list[LayerTrace]
    replayed: list[int]
    start: int


# Attention of one KV head's group over a part of the context.


def attention_scores(
    query: torch.Tensor,  # [group, num_queries, head_dim]
    keys: torch.Tensor,  # [num_tokens, head_dim]
    options: AttentionOptions,
) -> torch.Tensor:  # [group, num_queries, num_tokens], float32
    return _scale(torch.matmul(query, keys.t()).float(), options)


def self_scores(
    query: torch.Tensor,  # [group, num_queries, head_dim]
    new_keys: torch.Tensor,  # [num_queries, head_dim]
    options: AttentionOptions,
) -> torch.Tensor:  # [group, num_queries], float32
    """Score each query with the key of its token."""
    return _scale((query * new_keys).sum(-1, dtype=torch.float32), options)


def _scale(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    scores.mul_(options.scaling)
    if options.softcap is not None:
        scores = torch.tanh_(scores.div_(options.softcap)).mul_(options.softcap)
    return scores


def causal_mask(
    positions: torch.Tensor,  # [num_queries]
    num_tokens: int,
    window: int | None = None,
) -> torch.Tensor:  # [num_queries, num_tokens], True for visible tokens
    columns = torch.arange(num_tokens, device=positions.device)
    mask = columns <= positions[:, None]
    if window is not None:
        mask &= columns > positions[:, None] - window
    return mask


def attention_weights(
    scores: torch.Tensor,  # [group, num_queries, num_tokens], -inf for hidden tokens
    sinks: torch.Tensor | None,  # [group]
) -> torch.Tensor:  # [group, num_queries, num_tokens]
    """Softmax over visible tokens, at least one for each query; sinks take a share."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def kept_mass(
    scores: torch.Tensor,  # [group, num_queries, num_tokens]
    visible: torch.Tensor,  # [num_queries, num_tokens]
    kept: torch.Tensor,  # [1 or group, num_queries, num_tokens], a subset of visible
) -> torch.Tensor:  # [group, num_queries], between 0 and 1
    """Share of the full softmax on the kept tokens."""
    hidden = float("-inf")
    total = scores.masked_fill(~visible, hidden).logsumexp(-1)
    part = scores.masked_fill(~kept, hidden).logsumexp(-1)
    return (part - total).exp().clamp_(max=1.0)
