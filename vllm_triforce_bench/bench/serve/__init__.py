"""``vllm-triforce bench --serve``: two ``vllm serve`` side by side, loaded in turns.

``settings`` -> ``cells`` and ``schedule`` (traffic and its order) -> ``requests`` -> ``contenders``
and ``server`` (the processes) -> ``measure`` (the loop), with ``load`` (vLLM's ``bench serve``) ->
``summary`` -> ``page``.
"""
