"""``vllm-triforce bench --serve``: two ``vllm serve`` side by side, loaded in turns.

``server`` (the processes), ``load`` (vLLM's ``bench serve``) -> ``measure`` (the loop) ->
``summary`` -> ``page``.
"""
