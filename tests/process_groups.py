"""vLLM's process groups, shared by all engines of a test process.

Where an engine in this process is collected, vLLM shuts it down and ends the groups of the process
with it (``vllm/v1/engine/core.py``, ``EngineCore.shutdown``), under the engines that still run.
When that happens depends on the garbage collector.
"""

import gc


def keep_process_groups() -> None:
    """From now on an engine that ends leaves the groups to the others."""
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = gc.collect


def end_process_groups() -> None:
    """When no engine is left: the next one makes its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
