"""Attention by platform: each further module here has one, of the module's name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_triforce.attention.platforms.base import AttentionPlatform
from vllm_triforce.registry import Registry

if TYPE_CHECKING:
    from vllm.platforms import Platform

BACKENDS: Mapping[str, type[AttentionPlatform]] = Registry(__name__, ("base", "AttentionPlatform"))


def platform_for(platform: "Platform") -> type[AttentionPlatform]:
    """Return the attention that fits a platform; a subclass goes before its base.

    Raises:
        ValueError: none fits, or several do, or a class does not name its platforms.
    """
    names = [name for backend in BACKENDS.values() for name in _platforms_of(backend)]
    fitting = [backend for backend in BACKENDS.values() if backend.fits(platform)]
    candidates = [
        backend
        for backend in fitting
        if not any(issubclass(other, backend) for other in fitting if other is not backend)
    ]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(
            f"platform {platform.device_name!r} has several attention backends, "
            f"{' and '.join(repr(backend.name) for backend in candidates)}; let fits() of one say "
            "no, or make one a subclass of the other"
        )
    *others, last = sorted(names)
    raise ValueError(
        f"TriForce has no sparse attention for platform {platform.device_name!r} yet; use vLLM on "
        f"{', '.join(others)} or {last}, or another speculative method"
    )


def _platforms_of(backend: type[AttentionPlatform]) -> tuple[str, ...]:
    """Return the names of a backend's platforms.

    Raises:
        ValueError: they are missing, or are no tuple.
    """
    names = getattr(backend, "platforms", None)
    if not names or not isinstance(names, tuple):
        raise ValueError(
            f"{backend.__module__}.{backend.__qualname__} has platforms = {names!r}: give it the "
            "names of its platforms as a tuple, such as ('CUDA',)"
        )
    return names
