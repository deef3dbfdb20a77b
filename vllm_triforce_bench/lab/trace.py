"""What a full pass of the target leaves behind: the full cache, and what policies ask of it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionOptions:
    """What a model asks of attention beside queries, keys and values."""

    scaling: float
    softcap: float | None = None
    """Scores are squeezed into plus or minus this (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """[num_heads], a learned score that takes part in the softmax and adds nothing (gpt-oss)."""
    window: int | None = None
    """Tokens that a sliding-window layer sees, its own included; such layers stay dense."""


@dataclass
class LayerTrace:
    """One layer of a recorded context of ``start + num_replayed`` tokens.

    Raises nothing and owns nothing but tensors; made by ``recording.Recording``.
    """

    keys: torch.Tensor  # [num_kv_heads, num_tokens, head_dim], RoPE applied
    values: torch.Tensor  # [num_kv_heads, num_tokens, value_dim]
    queries: torch.Tensor  # [num_heads, 1 + num_replayed, head_dim], from position start - 1 on
    start: int
    """Position of the first replayed token: the prompt's length."""
    options: AttentionOptions
    mass: torch.Tensor | None = None
    """[num_kv_heads, start], attention that each token had from the prompt's queries, summed over
    them and the heads of a group; None unless a policy needs it."""

    @property
    def num_replayed(self) -> int:
        return self.queries.shape[1] - 1

    @property
    def num_tokens(self) -> int:
        return self.start + self.num_replayed

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    def heads(self, kv_head: int) -> slice:
        """The query heads of a KV head."""
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def positions(self) -> torch.Tensor:  # [num_replayed]
        return torch.arange(self.start, self.num_tokens, device=self.keys.device)

    def sinks(self, kv_head: int) -> torch.Tensor | None:  # [group]
        sinks = self.options.sinks
        return None if sinks is None else sinks[self.heads(kv_head)]


@dataclass
class Trace:
    """A recorded context: all layers, and the tokens that are replayed."""

    layers: list[LayerTrace]
    replayed: list[int]
    """Token ids fed at positions start, start + 1, ...; what follows each is compared."""
    start: int
