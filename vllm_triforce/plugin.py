"""Entry point of vLLM's ``vllm.general_plugins``: installs two wrappers, inert unless asked for."""

_registered = False


def register() -> None:
    """Lets ``EngineArgs`` understand the method ``triforce``.

    vLLM calls this in every process, more than once, so it is idempotent and loads
    nothing but the wrappers.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm_triforce.config.engine_args import install

    install()
