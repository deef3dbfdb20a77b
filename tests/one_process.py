"""What a process needs in which engines, stock and others, come and go, and what saves time."""

import gc


def allow_many_engines() -> None:
    """To be called before an engine is made; idempotent.

    Where an engine in this process is collected, vLLM shuts it down and ends the process groups
    with it (``vllm/v1/engine/core.py``, ``EngineCore.shutdown``), under the engines that still
    run, whenever the garbage collector comes to it: an engine that ends leaves them to the others.
    And no CPU engine starts in a process that has loaded numba, which some test may have done
    (patches/README.md). vLLM makes the group of the experts with the first engine alone, if that
    has any.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding

    core.cleanup_dist_env_and_memory = gc.collect
    fix_kernel_rebinding()
    parallel_state._EP = parallel_state._EP or parallel_state._DP
    _freeze_modules()


def inspect_models_here() -> None:
    """Inspect model classes in this process: vLLM starts another for each, which imports vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _freeze_modules() -> None:
    """Freeze what is imported by now, and let nobody freeze or unfreeze anything later.

    vLLM freezes an engine with all modules, and unfreezes both when the engine ends. It collects
    seven times an engine, each time for half a second if the modules are among what is collected.
    An engine that exists by now is never collected.
    """
    if gc.freeze is not _leave_frozen:
        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = _leave_frozen


def _leave_frozen() -> None:
    pass


def end_process_groups() -> None:
    """End vLLM's process groups when no engine is left; the next one makes its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
