"""Wrappers of the package around functions that stand in for vLLM's."""

from vllm_triforce.vllm_patches import PATCHES


def wrap(name: str, original):
    """Wrap a function as the patch of ``OWNER.attribute`` wraps vLLM's."""
    return next(patch for patch in PATCHES if patch.name == name).wrap(original)
