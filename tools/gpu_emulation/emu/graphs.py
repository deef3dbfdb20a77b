"""Stand-ins for CUDA graphs: a capture records launches, and a replay launches them again.

As in a real graph, Python does not run in a replay. Each operation gets the same tensors and
numbers as in the capture, and writes to the same memory. So a replay ignores inputs in new tensors
or as numbers, and its tokens differ. Operations that wait for the device, which break a real
capture, are refused.

Unlike in a real graph, a capture also computes, and graphs share no memory.
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

# Operations that launch nothing. Most allocate uninitialized memory: a replay uses the memory of
# the capture.
_WITHOUT_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach_"
}  # fmt: skip

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

num_captured = 0
num_replayed = 0


class Graph:
    """Stand-in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.launches: list[Callable[[], object]] = []
        self.kernels: list[str] = []
        """Names of the kernels that a GPU launches, in order."""

    def replay(self) -> None:
        global num_replayed
        with torch.inference_mode(), _disable_current_modes():
            for launch in self.launches:
                launch()
        num_replayed += 1

    def reset(self) -> None:
        self.launches.clear()
        self.kernels.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class Recorder(TorchDispatchMode):
    """Records every operation that writes memory in a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _refuse_to_wait(func, args)
        result = func(*args, **kwargs)
        if func._schema.name.removeprefix("aten::") in _WITHOUT_LAUNCH:
            return result
        inputs = {_memory(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        # Results in new memory; views and results written in place need no copy in a replay.
        outputs = [
            (index, value)
            for index, value in enumerate(tree_leaves(result))
            if _is_tensor(value) and _memory(value) not in inputs
        ]
        runs_inside = _is_written_in_python(func)
        if not runs_inside and (outputs or func._schema.is_mutable):
            self.graph.launches.append(lambda: _relaunch(func, args, kwargs, outputs))
            self.graph.kernels += _kernels_of(func, args)
        return result


def _relaunch(func, args, kwargs, outputs: list[tuple[int, torch.Tensor]]) -> None:
    results = tree_leaves(func(*args, **kwargs))
    for index, value in outputs:
        value.copy_(results[index])


def _kernels_of(func, args) -> list[str]:
    """Return the kernels of an operation. Most have one."""
    name = func._schema.name
    if name != "_vllm_fa3_C::fwd":
        return [name]
    given = dict(zip((argument.name for argument in func._schema.arguments), args))
    prepare = [f"{name} prepare"] if given["scheduler_metadata"] is None else []
    return [*prepare, name, f"{name} combine"]


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _is_written_in_python(func) -> bool:
    """True for vLLM's operations in Python, whose launches are recorded by ``records_inside``.

    They read the forward context, which a replay does not have.
    """
    return func.namespace == "vllm"


def _refuse_to_wait(func, args) -> None:
    if func is torch.ops.aten.index.Tensor:
        is_waiting = any(_is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    else:
        is_waiting = func is torch.ops.aten.is_nonzero.default or not _WAITING.isdisjoint(func.tags)
    if is_waiting:
        raise RuntimeError(
            f"{func} in the capture of a CUDA graph: its result depends on numbers on the device, "
            "and CUDA refuses to wait for them during a capture; compute it before the capture"
        )


_recording: list[Recorder] = []


@contextmanager
def capturing(graph: Graph, pool=None, stream=None, capture_error_mode: str = "global", **kwargs):
    """Stand-in for ``torch.cuda.graph``."""
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


def perform(name: str, launch: Callable[[], None]) -> None:
    """Launch a Triton kernel, which no dispatcher sees, and record it during a capture."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.graph.launches.append(launch)
        mode.graph.kernels.append(name)
        with _disable_current_modes():
            launch()
    else:
        launch()


def records_inside(function: Callable) -> Callable:
    """Wrap an operation written in Python so that a capture records its launches."""

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
