"""Quest (arXiv 2406.10774): upper bound of the query's product with any key of the chunk."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy, Summary


class QuestPolicy(SelectionPolicy):
    """Quest.

    Mechanism: chunks with the largest upper bound of a query's product with any of their keys, by
    the minimum and maximum of each head dimension; the query heads of a group vote together.
    Paper: arXiv 2406.10774 (ICML 2024), section 3.3, which selects for each query.
    Parameters: ``budget``, ``chunk_size``, ``recent_tokens``.
    """

    name = "quest"
    summaries = (Summary.MIN, Summary.MAX)

    def score(self, query, summaries, num_chunks):
        low, high = summaries[Summary.MIN], summaries[Summary.MAX]
        upper = torch.matmul(query.clamp(min=0), high.transpose(-1, -2))
        return upper + torch.matmul(query.clamp(max=0), low.transpose(-1, -2))
