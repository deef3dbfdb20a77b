"""Stand-ins for CUDA graphs: what is launched during a capture is kept, and a replay launches it
again.

As in a real graph, Python does not run in a replay: every operation gets the very tensors and
numbers that it got in the capture, and writes where it wrote then. So what is handed to a captured
pass in new tensors, or as a number, is not seen by a replay, and comes out as other tokens. What
would make the host wait for the device, and thus break a real capture, is refused.

Unlike in a real graph, a capture computes as well, and no two graphs share memory.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

# They make memory and leave its contents open: a replay finds the memory of the capture.
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

num_captured = 0
num_replayed = 0


class Graph:
    """For ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.launches: list[Callable[[], object]] = []

    def replay(self) -> None:
        global num_replayed
        with torch.inference_mode():
            for launch in self.launches:
                launch()
        num_replayed += 1

    def reset(self) -> None:
        self.launches.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class Recorder(TorchDispatchMode):
    """Adds every operation to a graph that writes memory."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _refuse_to_wait(func, args)
        result = func(*args, **kwargs)
        if func._schema.name.removeprefix("aten::") in _ALLOCATE:
            return result
        given = {_memory(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        # What lies in memory of its own; views, and what was written in place, need no copy.
        made = [
            (place, value)
            for place, value in enumerate(tree_leaves(result))
            if _is_tensor(value) and _memory(value) not in given
        ]
        runs_inside = _is_written_in_python(func)
        if not runs_inside and (made or func._schema.is_mutable):
            self.graph.launches.append(lambda: _again(func, args, kwargs, made))
        return result


def _again(func, args, kwargs, made: list[tuple[int, torch.Tensor]]) -> None:
    found = tree_leaves(func(*args, **kwargs))
    for place, value in made:
        value.copy_(found[place])


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _is_written_in_python(func) -> bool:
    """vLLM's own operations read Python's state (the forward context), which a replay does not
    have: what they launch is recorded instead (``records_inside``)."""
    return func.namespace == "vllm"


def _refuse_to_wait(func, args) -> None:
    if func is torch.ops.aten.index.Tensor:
        waits = any(_is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    else:
        waits = func is torch.ops.aten.is_nonzero.default or not _WAITING.isdisjoint(func.tags)
    if waits:
        raise RuntimeError(
            f"{func} in the capture of a CUDA graph: its result depends on numbers that lie on the "
            "device, and CUDA refuses to wait for them there; compute it before the capture"
        )


_recording: list[Recorder] = []


@contextmanager
def capturing(graph: Graph, pool=None, stream=None, capture_error_mode: str = "global", **kwargs):
    """For ``torch.cuda.graph``."""
    global num_captured
    if _recording:
        raise RuntimeError("a CUDA graph is being captured already")
    recorder = Recorder(graph)
    _recording.append(recorder)
    try:
        with recorder:
            yield
    finally:
        _recording.pop()
    num_captured += 1


def is_capturing(*args) -> bool:
    return bool(_recording)


def perform(launch: Callable[[], None]) -> None:
    """Runs what no dispatcher sees, a Triton kernel; kept where a graph is being captured."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.graph.launches.append(launch)
        with _disable_current_modes():
            launch()
    else:
        launch()


def records_inside(function: Callable) -> Callable:
    """Of an operation that is written in Python: what it launches is recorded."""

    def call(*args, **kwargs):
        if not _recording or _get_current_dispatch_mode() is not None:
            return function(*args, **kwargs)
        with _recording[-1]:
            return function(*args, **kwargs)

    return call


def install() -> None:
    implement = torch.library.Library.impl

    def impl(library, name, function, *args, **kwargs):
        if library.ns == "vllm" and not isinstance(function, str):
            function = records_inside(function)
        return implement(library, name, function, *args, **kwargs)

    torch.library.Library.impl = impl
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = capturing
    torch.cuda.graph_pool_handle = lambda: (0, 1)
    torch.cuda.is_current_stream_capturing = is_capturing
