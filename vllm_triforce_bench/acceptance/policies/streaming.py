"""Streaming (StreamingLLM, arXiv 2309.17453): sink and recent tokens."""

from vllm_triforce.selection import StreamingPolicy
from vllm_triforce_bench.acceptance.policies.chunked import ChunkedPolicy


class Streaming(ChunkedPolicy):
    """StreamingLLM.

    Mechanism: the first chunk, and the newest tokens for all the rest of the budget, at their
    absolute positions; what ``selection: streaming`` reads at level 2.
    Paper: arXiv 2309.17453, which moves the positions together; its sink is 4 tokens.
    Parameters: ``budget``, ``chunk_size`` (the sink is one chunk), ``refresh_interval``.
    """

    name = "streaming"
    selection = StreamingPolicy
