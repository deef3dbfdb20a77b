"""The sparse pass: every replayed token reads what a policy keeps for it, at all layers.

All replayed tokens go through the model at once, as queries that do not see each other: the keys
and values of earlier tokens are the full pass's (level 3 has overwritten level 2's), and only a
token's own come from its sparse hidden state.
"""

import torch

from vllm_triforce_bench.lab.attention import (
    attention_scores,
    attention_weights,
    causal_mask,
    kept_mass,
    own_scores,
)
from vllm_triforce_bench.lab.policies.base import LabPolicy
from vllm_triforce_bench.lab.trace import AttentionOptions, LayerTrace


class Replay:
    """Attention of a sparse pass.

    Args:
        layers: the recorded context.
        policy: says what is kept; None keeps everything, which is the reference.
    """

    def __init__(self, layers: list[LayerTrace], policy: LabPolicy | None) -> None:
        self._layers = layers
        self._policy = policy
        self._masses: list[torch.Tensor] = []
        self._reads: list[torch.Tensor] = []

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_heads, num_replayed, head_dim]
        keys: torch.Tensor,  # [num_kv_heads, num_replayed, head_dim], the tokens' own
        values: torch.Tensor,  # [num_kv_heads, num_replayed, value_dim], the tokens' own
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, num_replayed, value_dim]
        layer = self._layers[layer_index]
        visible = causal_mask(layer.positions(), layer.num_tokens, options.window)
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        for head in range(keys.shape[0]):
            heads = layer.heads(head)
            scores = attention_scores(query[heads], layer.keys[head], options)
            own = own_scores(query[heads], keys[head], options)
            scores.diagonal(layer.start, 1, 2).copy_(own)
            mask = visible[None]
            if self._policy is not None and options.window is None:
                mask = mask & self._policy.mask(layer, head, scores, visible)
                self._masses.append(kept_mass(scores, visible, mask).mean())
                self._reads.append(mask.sum(-1, dtype=torch.float32).mean())
            weights = attention_weights(
                scores.masked_fill_(~mask, float("-inf")), layer.sinks(head)
            )
            own_weights = weights.diagonal(layer.start, 1, 2).clone()
            weights.diagonal(layer.start, 1, 2).zero_()
            attended = weights.to(values.dtype) @ layer.values[head]
            output[heads] = attended + own_weights[..., None].to(values.dtype) * values[head]
        return output

    @property
    def kept_mass(self) -> float:
        """Mean share of full attention that the kept tokens have; 1 without a sparse layer."""
        return float(torch.stack(self._masses).mean()) if self._masses else 1.0

    @property
    def tokens_read(self) -> float:
        """Mean tokens that a sparse layer's query head reads, its own included."""
        return float(torch.stack(self._reads).mean()) if self._reads else 0.0
