"""Entry point of vLLM's ``vllm.general_plugins``: installs wrappers, inert unless asked for."""

_has_warned = False


def register() -> None:
    """Lets ``EngineArgs`` understand the method ``triforce``.

    vLLM calls this in every process, more than once, so it is idempotent and loads
    nothing but the wrappers. A vLLM that lacks something of what they wrap is left as it is, and
    goes on: this is called wherever we are installed, whether or not TriForce is asked for.
    """
    if missing := _missing():
        _say_once(missing)
        return
    from vllm_triforce import vllm_patches

    # Every time: an engine's process comes here again once it has loaded the scheduler.
    vllm_patches.install(engine_process=False)


def _missing() -> list[str]:
    """Everything is looked for before anything is wrapped: all of it, or nothing."""
    try:
        from vllm_triforce import vllm_patches

        return vllm_patches.missing(engine_process=False)
    except Exception as error:  # a module that moved, or does not load
        return [f"{type(error).__name__}: {error}"]


def _say_once(missing: list[str]) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    from vllm.logger import init_logger

    from vllm_triforce.config.checks import SUPPORTED_VLLM

    init_logger("vllm.triforce").warning(
        "vllm-triforce leaves this vLLM alone, and method 'triforce' is not available: it does "
        "not have what would be wrapped (%s). Install vLLM %s, or uninstall vllm-triforce.",
        ", ".join(missing),
        ", ".join(SUPPORTED_VLLM),
    )
