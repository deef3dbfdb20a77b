"""The head: one layer over the target's states and the next token (EAGLE-3, section 3).

The names of its parameters are those of the checkpoint.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Shape of a head, as of the target's layers."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    draft_vocab: int

    @classmethod
    def of(cls, config, draft_vocab: int) -> "Shape":
        """Return the shape for a target's config."""
        rope = getattr(config, "rope_parameters", None) or {}
        heads = config.num_attention_heads
        return cls(
            config.hidden_size,
            config.intermediate_size,
            heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)),
            config.rms_norm_eps,
            draft_vocab,
        )


class Attention(nn.Module):
    """Projections of the layer; ``Layer`` attends."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)


class MLP(nn.Module):
    """Gated feed-forward part of the layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Decoder layer whose attention reads the next token's embedding beside the state."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.self_attn, self.mlp = Attention(s), MLP(s)
        self.input_layernorm = nn.RMSNorm(s.hidden, s.eps)
        self.hidden_norm = nn.RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, s.eps)

    def forward(
        self,
        embeds: torch.Tensor,  # [rows, length, hidden]
        hidden: torch.Tensor,  # as embeds
        positions: torch.Tensor,  # [length]
        cache: list[tuple[torch.Tensor, torch.Tensor]],  # keys, values of each earlier step
    ) -> torch.Tensor:  # as embeds
        """Run one step of the training-time test, and append its keys and values to ``cache``."""
        s, attention = self.shape, self.self_attn
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        q, k, v = (
            projection(x).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotated(q, positions, s.theta), rotated(k, positions, s.theta)
        groups = s.heads // s.kv_heads
        cache.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        hidden = hidden + attention.o_proj(attend(q, cache).transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """Drafts ``num_steps`` tokens at each place of a sequence, as level 1 does at one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)

    def forward(
        self,
        aux: torch.Tensor,  # [rows, length, 3 * hidden], the target's states
        embeds: torch.Tensor,  # [rows, length + num_steps - 1, hidden], of the next tokens
        num_steps: int,
    ):
        """Yield the logits of each step, [rows, length, draft_vocab].

        Step j at place i has drafted j tokens after token i + 1: its logits are of token i + j + 2,
        and its position is i + j.
        """
        length = aux.shape[1]
        hidden, cache = self.fc(aux), []
        for step in range(num_steps):
            positions = torch.arange(step, step + length, device=aux.device)
            hidden = self.midlayer(embeds[:, step : step + length], hidden, positions, cache)
            yield self.lm_head(self.norm(hidden))


def attend(q: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attend to the first step's entries up to each place, and to its own of the later steps.

    Args:
        q: [rows, heads, length, head_dim].
        cache: keys and values of each step, as ``q``.
    """
    (keys, values), *later = cache
    length = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ keys.mT).masked_fill(future, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :length] @ values
    for i, (_, v) in enumerate(later):
        out = out + weights[..., length + i, None] * v
    return out


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply RoPE in the layout of Llama: [..., length, head_dim]."""
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
