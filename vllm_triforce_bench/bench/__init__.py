"""``vllm-triforce bench``: methods compared in one run, interleaved, and the page drawn of it.

The way of a measurement: ``settings`` (what was asked for, checked) -> ``methods`` and ``grid``
(what to measure, in which order) -> ``prompts`` -> ``engines`` -> ``stream`` (one batch, timed) ->
``measure`` (the loop), ``identity`` (are greedy outputs stock's) -> ``store`` -> ``summary`` ->
``figures``, ``page``, ``terminal``. See docs/bench.md.
"""
