"""Makes a failing stream smaller, on the settings that it failed with.

Each try may need a fresh engine, which takes seconds: hypothesis would take hundreds of them.
"""

import time
from collections.abc import Callable, Iterator


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
    params, prompt = request["params"], request["prompt"]
    for key in ("abort", "priority", "lora", "pause", "reset", "turns"):
        if request.get(key):
            yield {name: value for name, value in request.items() if name != key}
    if request["arrive"]:
        yield request | {"arrive": 0}
    for key in params:
        if key not in ("max_tokens", "temperature"):
            rest = {name: value for name, value in params.items() if name != key}
            if key != "ignore_eos":
                yield request | {"params": rest}
    if params["temperature"]:
        sampling = ("top_p", "top_k", "min_p", "seed", "n")
        rest = {name: value for name, value in params.items() if name not in sampling}
        yield request | {"params": rest | {"temperature": 0}}
    if params["max_tokens"] > 1 and params.get("min_tokens", 0) <= params["max_tokens"] // 2:
        yield request | {"params": params | {"max_tokens": params["max_tokens"] // 2}}
    if prompt.get("shared"):
        yield request | {"prompt": prompt | {"shared": 0}}
    if prompt["length"] > 8:
        yield request | {"prompt": prompt | {"length": prompt["length"] // 2}}
