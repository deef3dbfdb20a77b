"""Retrieval (TriForce, arXiv 2404.11912, section 4.2): query times mean key of the chunk."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy


class RetrievalPolicy(SelectionPolicy):
    """Chunks whose mean key has the largest product with the newest query.

    With grouped-query attention the query heads of a group vote together: each gives every
    chunk the softmax of its scaled scores, and the votes are added up, so that a head with
    large logits does not outvote the others.
    """

    def select(self, query, chunk_mean_keys, num_selected):
        scores = score_chunks(query, chunk_mean_keys)
        return scores.topk(num_selected, dim=-1, sorted=False).indices


def score_chunks(
    query: torch.Tensor,  # [num_layers, num_heads, head_dim]
    chunk_mean_keys: torch.Tensor,  # [num_layers, num_kv_heads, num_chunks, head_dim]
) -> torch.Tensor:  # [num_layers, num_kv_heads, num_chunks]
    num_layers, num_kv_heads, _, head_dim = chunk_mean_keys.shape
    grouped = query.view(num_layers, num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, chunk_mean_keys.transpose(-1, -2))
    if grouped.shape[2] == 1:
        return scores.squeeze(2)
    return (scores.float() * head_dim**-0.5).softmax(-1).sum(2)
