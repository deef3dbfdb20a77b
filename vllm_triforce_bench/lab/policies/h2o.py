"""H2O (Heavy-Hitter Oracle, arXiv 2306.14048): tokens with the most attention so far."""

import torch

from vllm_triforce_bench.lab.policies.base import LabPolicy
from vllm_triforce_bench.lab.trace import attention_scores, attention_weights


class H2O(LabPolicy):
    """H2O.

    Mechanism: half of the budget are the newest tokens, half the older tokens with the most
    attention, summed over all earlier queries and the query heads of a group.
    Paper: arXiv 2306.14048. There a dropped token gathers no more attention; here the sums are
    those of full attention, which favours H2O.
    Parameters: ``budget``.
    """

    name = "h2o"
    needs_mass = True

    def keep(self, layer, kv_head, query, scores, visible):
        recent = self.sizes.budget // 2
        heavy = self.sizes.budget - recent
        positions = layer.positions()[:, None]
        columns = torch.arange(layer.num_tokens, device=positions.device)
        newest = columns > positions - recent
        gathered = self.gathered_mass(layer, kv_head, visible).masked_fill_(newest, -1.0)
        # With fewer older tokens than room the caller's mask decides.
        chosen = gathered.topk(min(heavy, layer.num_tokens), dim=-1, sorted=False).indices
        return newest.scatter(1, chosen, True)[None]

    @staticmethod
    def gathered_mass(
        layer,
        kv_head: int,
        visible: torch.Tensor,  # [num_replayed, num_tokens]
    ) -> torch.Tensor:  # [num_replayed, num_tokens]
        """Attention of each token from all queries before each replayed token."""
        query = layer.queries[layer.heads(kv_head), 1:]
        scores = attention_scores(query, layer.keys[kv_head], layer.options)
        scores.masked_fill_(~visible, float("-inf"))
        rows = attention_weights(scores, layer.sinks(kv_head)).sum(0)
        before = rows.cumsum(0).sub_(rows)
        before[:, : layer.start] += layer.mass[kv_head]
        return before
