"""Retrieval (TriForce, arXiv 2404.11912, section 4.2): query times mean key of the chunk."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy, Summary


class RetrievalPolicy(SelectionPolicy):
    """Retrieval (TriForce).

    Mechanism: chunks whose mean key has the largest product with a query; the query heads of a
    group vote together.
    Paper: arXiv 2404.11912, section 4.2, which selects once, after the prompt.
    Parameters: ``budget``, ``chunk_size``, ``recent_tokens``.
    """

    name = "retrieval"
    summaries = (Summary.MEAN,)

    def score(self, query, summaries, num_chunks):
        return torch.matmul(query, summaries[Summary.MEAN].transpose(-1, -2))
