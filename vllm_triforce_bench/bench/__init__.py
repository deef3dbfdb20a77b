"""``vllm-triforce bench``: TriForce beside stock vLLM, in turns, and a page of it (docs/bench.md).

``batch`` decodes fixed batches in one process, ``serve`` loads two ``vllm serve``. Both go from
``settings`` over a schedule and ``measure`` to ``store``, and from the records of the store over
``summary`` to ``report``.
"""

from vllm_triforce_bench.options import BadInput

__all__ = ["BadInput"]
