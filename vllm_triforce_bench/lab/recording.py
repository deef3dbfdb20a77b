"""The full pass: dense attention piece by piece, and everything that replays need of it."""

import torch

from vllm_triforce_bench.lab.attention import (
    attention_scores,
    attention_weights,
    causal_mask,
)
from vllm_triforce_bench.lab.trace import AttentionOptions, LayerTrace

_SCORES_AT_A_TIME = {"cpu": 1 << 20}
"""Numbers of one head group's scores held at a time: on a CPU they should stay in its cache."""
_SCORES_AT_A_TIME_ELSEWHERE = 1 << 25


class _Layer:
    """One layer's full cache, filled piece by piece."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = self.values = self.mass = self.options = None
        self.queries: list[torch.Tensor] = []

    def append(
        self,
        keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
        values: torch.Tensor,  # [num_kv_heads, n, value_dim]
        position: int,
    ) -> None:
        if self.keys is None:
            heads = keys.shape[0]
            self.keys = keys.new_empty(heads, self.capacity, keys.shape[-1])
            self.values = values.new_empty(heads, self.capacity, values.shape[-1])
            self.mass = keys.new_zeros(heads, self.capacity, dtype=torch.float32)
        end = position + keys.shape[1]
        self.keys[:, position:end] = keys
        self.values[:, position:end] = values


class Recording:
    """Attention of a full pass over ``start`` prompt tokens and the replayed ones after them.

    Args:
        num_layers: layers with attention.
        capacity: tokens of the prompt and the replay together.
        start: tokens of the prompt.
        with_mass: sum up the attention that each prompt token gets (H2O).
    """

    def __init__(self, num_layers: int, capacity: int, start: int, with_mass: bool) -> None:
        self.start = start
        self.with_mass = with_mass
        self.position = 0
        self._layers = [_Layer(capacity) for _ in range(num_layers)]

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_heads, n, head_dim], positions ``self.position`` and on
        keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
        values: torch.Tensor,  # [num_kv_heads, n, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, n, value_dim]
        layer, first = self._layers[layer_index], self.position
        layer.append(keys, values, first)
        layer.options = options
        end = first + query.shape[1]
        if end >= self.start:  # from position start - 1 on
            layer.queries.append(query[:, max(0, self.start - 1 - first) :].clone())
        group = query.shape[0] // keys.shape[0]
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        at_a_time = _SCORES_AT_A_TIME.get(query.device.type, _SCORES_AT_A_TIME_ELSEWHERE)
        rows = max(1, at_a_time // (group * end))
        for begin in range(first, end, rows):
            positions = torch.arange(begin, min(begin + rows, end), device=query.device)
            reach = int(positions[-1]) + 1
            # Without a window, all that these queries may not see lies among themselves.
            low = begin if options.window is None else 0
            hidden = ~causal_mask(positions, reach, options.window)[:, low:]
            here = slice(begin - first, begin - first + len(positions))
            for head in range(keys.shape[0]):
                heads = slice(head * group, (head + 1) * group)
                scores = attention_scores(query[heads, here], layer.keys[head, :reach], options)
                sinks = None if options.sinks is None else options.sinks[heads]
                scores[..., low:].masked_fill_(hidden, float("-inf"))
                weights = attention_weights(scores, sinks)
                if self.with_mass and first < self.start:
                    layer.mass[head, :reach] += weights.sum((0, 1))
                output[heads, here] = weights.to(values.dtype) @ layer.values[head, :reach]
        return output

    def layer_traces(self) -> list[LayerTrace]:
        """What was recorded so far, prompt and replayed tokens.

        Raises:
            RuntimeError: a layer without attention: the model is not all full or sliding-window
                attention.
        """
        if any(layer.keys is None for layer in self._layers):
            missing = [i for i, layer in enumerate(self._layers) if layer.keys is None]
            raise RuntimeError(
                f"layers {missing} of the model called no attention that the lab can stand in "
                "for; it needs a transformer whose layers all have attention of their own"
            )
        return [
            LayerTrace(
                keys=layer.keys[:, : self.position],
                values=layer.values[:, : self.position],
                queries=torch.cat(layer.queries, 1),
                start=self.start,
                options=layer.options,
                mass=layer.mass[:, : self.start] if self.with_mass else None,
            )
            for layer in self._layers
        ]
