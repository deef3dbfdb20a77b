"""Selection policy outside vllm-triforce: the mean of mean keys' and Quest's scores."""

import torch

from vllm_triforce.selection import SelectionPolicy, Summary


class BlendPolicy(SelectionPolicy):
    """Blend.

    Mechanism: chunks with the largest mean of two scores: the product of the newest verified query
    with the chunk's mean key, and Quest's upper bound of its product with any of the chunk's keys.
    The first misses a single outstanding key. The second trusts bounds that no key may reach.
    """

    name = "blend"  # as the entry point in pyproject.toml and the key `selection`
    summaries = (Summary.MEAN, Summary.MIN, Summary.MAX)

    def score(
        self,
        query,  # [..., num_kv_heads, group, head_dim]
        summaries,  # by kind [..., num_kv_heads, num_chunks, head_dim]
        num_chunks,
    ):  # [..., num_kv_heads, group, num_chunks]
        mean = torch.matmul(query, summaries[Summary.MEAN].mT)
        bound = torch.matmul(query.clamp(min=0), summaries[Summary.MAX].mT)
        bound = bound + torch.matmul(query.clamp(max=0), summaries[Summary.MIN].mT)
        return (mean + bound) / 2
