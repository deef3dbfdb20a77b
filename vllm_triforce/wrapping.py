"""The methods of vLLM that are wrapped in the processes of an engine and of its front."""

import functools

from vllm_triforce.metrics import carrier
from vllm_triforce.scheduler import draft_carrier


def missing(engine_process: bool) -> list[str]:
    """What ``install()`` would wrap and this vLLM does not have."""
    return [
        f"{owner.__name__}.{name}"
        for owner, name, _ in _to_wrap(engine_process)
        if not callable(vars(owner).get(name))  # an interface's own would be no implementation
    ]


def install(engine_process: bool) -> None:
    """Wraps each once; all fall through where TriForce is not in use.

    Args:
        engine_process: False where it is not known that an engine will run here: what vLLM has
            not loaded is then left alone.
    """
    for owner, name, wrap in _to_wrap(engine_process):
        original = getattr(owner, name)
        if not hasattr(original, "_triforce"):
            wrapped = functools.wraps(original)(wrap(original))
            wrapped._triforce = True
            setattr(owner, name, wrapped)


def _to_wrap(engine_process: bool) -> list:
    return carrier.to_wrap(engine_process) + draft_carrier.to_wrap(engine_process)
