"""``vllm-triforce bench --serve``: two ``vllm serve`` side by side, measured in turns.

The way of a measurement: ``settings`` (what was asked for, checked) -> ``cells`` and ``schedule``
(what to measure, in which order) -> ``requests`` -> ``contenders`` and ``server`` (the processes)
-> ``load`` (vLLM's own ``bench serve``) -> ``measure`` (the loop) -> ``store`` -> ``summary`` ->
``figures``, ``page``, ``terminal``. See docs/bench.md.
"""
