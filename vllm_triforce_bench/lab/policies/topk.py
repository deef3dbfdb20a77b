"""Exact top-k: the ceiling of what a budget can keep."""

import torch

from vllm_triforce_bench.lab.policies.base import LabPolicy


class TopK(LabPolicy):
    """Exact top-k.

    Mechanism: each query head reads the ``budget`` tokens that its own current query scores
    highest: no other choice of as many tokens keeps more of its attention. It reads all keys to
    find them, so it saves nothing: a ceiling, not a method.
    Paper: the ideal of arXiv 2404.11912, table 1 ("Top-K").
    Parameters: ``budget``.
    """

    name = "topk"

    def keep(self, layer, kv_head, scores, visible):
        hidden = scores.masked_fill(~visible, float("-inf"))
        chosen = hidden.topk(min(self.sizes.budget, layer.num_tokens), dim=-1, sorted=False).indices
        return torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, chosen, True)
