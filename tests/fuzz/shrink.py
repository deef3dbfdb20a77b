"""Makes a failing stream smaller, on the settings that it failed with.

Each try may need a fresh engine, which takes seconds: hypothesis would take hundreds of them.
"""

import time
from collections.abc import Callable, Iterator

KEPT = {"max_tokens", "temperature", "ignore_eos"}


def shrink(stream: list[dict], fails: Callable[[list[dict]], bool], seconds: float) -> list[dict]:
    """The smallest stream found in the time given that still fails; maybe the same.

    Args:
        fails: whether a stream shows the fault in question.
    """
    deadline = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(stream):
            if time.monotonic() > deadline:
                return stream
            if fails(candidate):
                stream, is_smaller = candidate, True
                break
    return stream


def _smaller(stream: list[dict]) -> Iterator[list[dict]]:
    """Fewer requests first, then simpler ones."""
    size = len(stream) // 2
    while size:
        for start in range(0, len(stream), size):
            if rest := stream[:start] + stream[start + size :]:
                yield rest
        size //= 2
    for i, request in enumerate(stream):
        for simpler in _simpler(request):
            yield [*stream[:i], simpler, *stream[i + 1 :]]


def _simpler(request: dict) -> Iterator[dict]:
    """The request with one thing less, or with less of it."""
    params, prompt = request["params"], request["prompt"]
    for key in ("abort", "priority", "lora", "pause", "reset", "turns"):
        if request.get(key):
            yield _without(request, key)
    if request["arrive"]:
        yield request | {"arrive": 0}
    changed = [_without(params, key) for key in params if key not in KEPT]
    if params["temperature"]:
        changed.append(
            _without(params, "top_p", "top_k", "min_p", "seed", "n") | {"temperature": 0}
        )
    if params["max_tokens"] > 1 and params.get("min_tokens", 0) <= params["max_tokens"] // 2:
        changed.append(params | {"max_tokens": params["max_tokens"] // 2})
    yield from (request | {"params": own} for own in changed)
    if prompt.get("shared"):
        yield request | {"prompt": prompt | {"shared": 0}}
    if prompt["length"] > 8:
        yield request | {"prompt": prompt | {"length": prompt["length"] // 2}}


def _without(its: dict, *names: str) -> dict:
    return {name: value for name, value in its.items() if name not in names}
