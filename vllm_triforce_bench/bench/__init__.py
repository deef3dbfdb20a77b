"""``vllm-triforce bench``: TriForce beside stock vLLM, in turns, and a page of it (docs/bench.md).

``batch`` decodes fixed batches in one process, ``serve`` loads two ``vllm serve``. Both go from
``settings`` over ``methods``, ``prompts`` and ``grid`` to ``measurement`` and ``store``, and from
the records of the store over a summary to ``page`` and ``report``.
"""
