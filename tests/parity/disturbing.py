"""What the drivers of both runners break things with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.inside import worker_of


@contextmanager
def replaced(owner, name: str, value) -> Iterator:
    """Sets an attribute meanwhile; yields what it was."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        setattr(owner, name, original)


@contextmanager
def watch(owner, name: str) -> Iterator[list]:
    """Yields a list that gets the (arguments, result) of each call of a method."""
    original, calls = getattr(owner, name), []

    def watched(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    with replaced(owner, name, watched):
        yield calls


class Poison:
    """A model in which one pass gives a NaN for one token of the first request of the batch.

    All of the model that follows is NaN for it, keys and values in the cache too, as where a
    kernel or an overflow is at fault.
    """

    def __init__(self, model, layer: torch.nn.Module, is_due) -> None:
        """
        Args:
            is_due: of the pass's number, from 1: whether it strikes, if it has not yet.
        """
        self.model, self._layer, self._is_due = model, layer, is_due
        self.num_passes = 0
        self.has_struck = False

    def __call__(self, **inputs):
        self.num_passes += 1
        if self.has_struck or not self._is_due(self.num_passes):
            return self.model(**inputs)
        self.has_struck = True
        handle = self._layer.register_forward_pre_hook(self._hook)
        try:
            return self.model(**inputs)
        finally:
            handle.remove()

    @staticmethod
    def _hook(module, args):
        positions, hidden, *rest = args
        hidden = hidden.clone()
        hidden[0] = float("nan")
        return positions, hidden, *rest

    def __getattr__(self, name):
        return getattr(self.model, name)


def are_finite(llm) -> bool:
    """Whether no layer's KV cache holds a NaN or an infinity."""
    config = worker_of(llm).vllm_config
    layers = config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
    assert caches
    return all(bool(cache.isfinite().all()) for cache in caches)
