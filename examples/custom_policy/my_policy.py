"""A selection policy outside vllm-triforce: half mean keys, half Quest's bound."""

import torch

from vllm_triforce.selection import SelectionPolicy, Summary


class BlendPolicy(SelectionPolicy):
    """Blend.

    Mechanism: chunks with the largest mean of two numbers: the product of the newest verified
    query with the chunk's mean key, and the largest product that any key of the chunk could have.
    The first misses a single key that stands out, the second trusts bounds that no key reaches.
    """

    name = "blend"  # the entry point's in pyproject.toml, and the key `selection`
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
