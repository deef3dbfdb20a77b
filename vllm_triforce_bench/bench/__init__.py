"""``vllm-triforce bench``: TriForce beside stock vLLM, in turns, and a page of it (docs/bench.md).

``batch`` decodes fixed batches by the ``engines`` of one process, ``serve`` loads two servers.
Both go from ``settings`` over ``methods``, ``prompts`` and ``grid`` to ``measurement``,
and from its records over ``batch_report`` or ``serve_report`` to ``report``.
"""
