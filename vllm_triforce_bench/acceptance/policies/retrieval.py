"""Retrieval (TriForce, arXiv 2404.11912, section 4.2): what this package ships."""

from vllm_triforce.selection import RetrievalPolicy
from vllm_triforce_bench.acceptance.policies.chunked import ChunkedPolicy


class Retrieval(ChunkedPolicy):
    """Retrieval (TriForce).

    Mechanism: chunks whose mean key has the largest product with the newest verified query; the
    query heads of a group vote together. The class that selects is the one that serves requests.
    Paper: arXiv 2404.11912, section 4.2, which selects once, after the prompt.
    Parameters: ``budget``, ``chunk_size``, ``recent_tokens``, ``refresh_interval``.
    """

    name = "retrieval"
    selection = RetrievalPolicy
