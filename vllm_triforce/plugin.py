"""Entry point of vLLM's ``vllm.general_plugins``: installs wrappers, inert unless asked for."""

_has_warned = False

DOES_NOT_LOAD = "modules of it do not load here"


def register() -> None:
    """Lets ``EngineArgs`` understand the method ``triforce``.

    vLLM calls this in every process, more than once, so it is idempotent and loads
    nothing but the wrappers. A vLLM of a version that is not supported, or that lacks something of
    what they wrap, is left as it is, and goes on: this is called wherever we are installed, whether
    or not TriForce is asked for.
    """
    if (reason := why_not()) is not None:
        _say_once(reason)
        return
    from vllm_triforce import vllm_patches

    # Every time: an engine's process comes here again once it has loaded the scheduler.
    vllm_patches.install(engine_process=False)


def why_not() -> str | None:
    """Why this vLLM is left alone; None where it is not.

    Everything is looked for before anything is wrapped: all of it, or nothing.
    """
    import vllm

    from vllm_triforce.config.supported import is_supported

    if not is_supported(vllm.__version__):
        return f"its version is {vllm.__version__}"
    try:
        from vllm_triforce import vllm_patches

        missing = vllm_patches.missing(engine_process=False)
    except (ImportError, AttributeError) as error:  # a module or a name that moved
        missing = [f"{type(error).__name__}: {error}"]
    except Exception as error:  # vLLM does not work here, with us or without
        return f"{DOES_NOT_LOAD} ({type(error).__name__}: {error})"
    return f"it does not have what would be wrapped: {', '.join(missing)}" if missing else None


def _say_once(reason: str) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    from vllm.logger import init_logger

    from vllm_triforce.config.supported import SUPPORTED_VLLM

    init_logger("vllm.triforce").warning(
        "vllm-triforce leaves this vLLM alone, and method 'triforce' is not available (%s). "
        "Install vLLM %s, or uninstall vllm-triforce.",
        reason,
        ", ".join(SUPPORTED_VLLM),
    )
