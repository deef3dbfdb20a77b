"""Streaming (StreamingLLM, arXiv 2309.17453): all of the budget goes to recent tokens."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy


class StreamingPolicy(SelectionPolicy):
    """The newest chunks: with the first chunk and the recent ones, sink plus recent tokens."""

    needs_scores = False

    def select(self, query, chunk_mean_keys, num_selected):
        num_layers, num_kv_heads, num_chunks = chunk_mean_keys.shape[:3]
        newest = torch.arange(num_chunks - num_selected, num_chunks, device=chunk_mean_keys.device)
        return newest.expand(num_layers, num_kv_heads, num_selected)
