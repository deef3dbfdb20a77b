"""Entry point of vLLM's ``vllm.general_plugins``: installs wrappers, inert unless asked for."""

_registered = False


def register() -> None:
    """Lets ``EngineArgs`` understand the method ``triforce``.

    vLLM calls this in every process, more than once, so it is idempotent and loads
    nothing but the wrappers.
    """
    global _registered
    from vllm_triforce.metrics import carrier

    # Every time: an engine's process comes here again once it has loaded the scheduler.
    carrier.install(engine_process=False)
    if _registered:
        return
    _registered = True
    from vllm_triforce.config.engine_args import install

    install(when_asked_for=lambda: carrier.install(engine_process=True))
