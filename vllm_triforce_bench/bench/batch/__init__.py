"""``vllm-triforce bench``: methods decode the same batches in one process, one after the other.

``engines`` -> ``measure`` (the loop), with ``stream`` (one batch, timed) and ``identity`` (greedy
outputs against stock vLLM's) -> ``summary`` -> ``page``.
"""
