"""Streaming (StreamingLLM, arXiv 2309.17453): all of the budget goes to recent tokens."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy


class StreamingPolicy(SelectionPolicy):
    """StreamingLLM.

    Mechanism: the first chunk, and the newest tokens for all the rest of the budget, at their
    absolute positions.
    Paper: arXiv 2309.17453, which closes the gap between positions and has a sink of 4 tokens.
    Parameters: ``budget``, ``chunk_size`` (the sink is one chunk).
    """

    name = "streaming"

    def score(self, query, summaries, num_chunks):
        newest = torch.arange(num_chunks, dtype=torch.float32, device=query.device)
        return newest.expand(*query.shape[:-2], 1, num_chunks)
