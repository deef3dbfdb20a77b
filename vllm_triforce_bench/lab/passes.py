"""Attention of the lab's two passes: the full one records, the sparse one replays."""

import torch

from vllm_triforce_bench.lab.policies import LabPolicy
from vllm_triforce_bench.lab.trace import (
    AttentionOptions,
    LayerTrace,
    attention_scores,
    attention_weights,
    causal_mask,
    kept_mass,
    self_scores,
)

# Scores of a head group held at a time; on a CPU they should stay in its cache.
_MAX_SCORES = {"cpu": 1 << 20}
_MAX_SCORES_ELSEWHERE = 1 << 25


class Recording:
    """Attention of a full pass over ``num_tokens``: ``start`` of the prompt, then replayed ones."""

    def __init__(self, num_layers: int, num_tokens: int, start: int) -> None:
        self.start = start
        self.position = 0
        self._num_layers, self._num_tokens = num_layers, num_tokens
        self._layers: dict[int, LayerTrace] = {}

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_heads, n, head_dim], positions ``self.position`` and on
        keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
        values: torch.Tensor,  # [num_kv_heads, n, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, n, value_dim]
        if layer_index not in self._layers:
            self._layers[layer_index] = self._empty_layer(query, keys, values, options)
        layer, first = self._layers[layer_index], self.position
        end = first + query.shape[1]
        layer.keys[:, first:end] = keys
        layer.values[:, first:end] = values
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        max_scores = _MAX_SCORES.get(query.device.type, _MAX_SCORES_ELSEWHERE)
        rows = max(1, max_scores // (layer.group * end))
        for begin in range(first, end, rows):
            positions = torch.arange(begin, min(begin + rows, end), device=query.device)
            reach = int(positions[-1]) + 1
            # Without a window, the tokens hidden from these queries lie among themselves.
            low = begin if options.window is None else 0
            hidden = ~causal_mask(positions, reach, options.window)[:, low:]
            here = slice(begin - first, begin - first + len(positions))
            for head in range(keys.shape[0]):
                heads = layer.heads(head)
                scores = attention_scores(query[heads, here], layer.keys[head, :reach], options)
                scores[..., low:].masked_fill_(hidden, float("-inf"))
                weights = attention_weights(scores, layer.sinks(head))
                output[heads, here] = weights.to(values.dtype) @ layer.values[head, :reach]
        return output

    def _empty_layer(self, query, keys, values, options: AttentionOptions) -> LayerTrace:
        """Make the cache that pieces of these tensors fill."""
        heads, num_tokens = keys.shape[0], self._num_tokens
        return LayerTrace(
            keys.new_empty(heads, num_tokens, keys.shape[-1]),
            values.new_empty(heads, num_tokens, values.shape[-1]),
            query.shape[0] // heads,
            self.start,
            options,
        )

    def layer_traces(self) -> list[LayerTrace]:
        """Return the recorded layers, prompt and replayed tokens.

        Raises:
            RuntimeError: a layer called no attention.
        """
        if missing := [i for i in range(self._num_layers) if i not in self._layers]:
            raise RuntimeError(
                f"layers {missing} of the model called no attention that the lab can stand in "
                "for; it needs a transformer whose layers all have attention of their own"
            )
        return [self._layers[index] for index in sorted(self._layers)]


class Replay:
    """Attention of a sparse pass: every replayed token reads the tokens that a policy keeps.

    All replayed tokens go through the model at once, hidden from each other. Keys and values of
    earlier tokens are the full pass's (level 3 has overwritten level 2's); a token's come from its
    sparse hidden state. A copy of another dtype attends in the target's dtype, as in the engine.
    Without a policy all tokens are kept, the reference.
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
        keys: torch.Tensor,  # [num_kv_heads, num_replayed, head_dim], of the replayed tokens
        values: torch.Tensor,  # [num_kv_heads, num_replayed, value_dim], of the replayed tokens
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, num_replayed, value_dim]
        layer = self._layers[layer_index]
        visible = causal_mask(layer.positions(), layer.num_tokens, options.window)
        dtype, stored = query.dtype, layer.keys.dtype
        query, keys, values = query.to(stored), keys.to(stored), values.to(stored)
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        for head in range(keys.shape[0]):
            heads = layer.heads(head)
            scores = attention_scores(query[heads], layer.keys[head], options)
            new_scores = self_scores(query[heads], keys[head], options)
            scores.diagonal(layer.start, 1, 2).copy_(new_scores)
            mask = visible[None]
            if self._policy is not None and options.window is None:
                mask = mask & self._policy.mask(layer, head, query[heads], scores, visible)
                self._masses.append(kept_mass(scores, visible, mask).mean())
                self._reads.append(mask.sum(-1, dtype=torch.float32).mean())
            weights = attention_weights(
                scores.masked_fill_(~mask, float("-inf")), layer.sinks(head)
            )
            new_weights = weights.diagonal(layer.start, 1, 2).clone()
            weights.diagonal(layer.start, 1, 2).zero_()
            attended = weights.to(values.dtype) @ layer.values[head]
            output[heads] = attended + new_weights[..., None].to(values.dtype) * values[head]
        return output.to(dtype)

    @property
    def kept_mass(self) -> float:
        """Mean share of full attention on the kept tokens; 1 without a sparse layer."""
        return float(torch.stack(self._masses).mean()) if self._masses else 1.0

    @property
    def tokens_read(self) -> float:
        """Mean tokens that a query head of a sparse layer reads, the newest included."""
        return float(torch.stack(self._reads).mean()) if self._reads else 0.0
