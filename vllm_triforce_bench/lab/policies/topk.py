"""Exact top-k: the ceiling of a budget."""

import torch

from vllm_triforce_bench.lab.policies.base import LabPolicy


class TopK(LabPolicy):
    """Exact top-k.

    Mechanism: each query head reads the ``budget`` tokens with the highest scores of its query. No
    other choice of this size keeps more attention. It reads all keys: a ceiling, not a method.
    Paper: the ideal of arXiv 2404.11912, table 1 ("Top-K").
    Parameters: ``budget``.
    """

    name = "topk"

    def keep(self, layer, kv_head, query, scores, visible):
        hidden = scores.masked_fill(~visible, float("-inf"))
        chosen = hidden.topk(min(self.sizes.budget, layer.num_tokens), dim=-1, sorted=False).indices
        return torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, chosen, True)
