"""Launches of Triton kernels: compiled for sm_90 to the cubin, then run in Triton's interpreter.

The cubin is not run. So a launch shows that the kernel compiles for these argument types, and that
its algorithm is right in numpy, but not that the machine code computes the same numbers.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
import triton.language.extra.libdevice as libdevice
import triton.runtime.interpreter as interpreter
import triton.runtime.jit as jit
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from . import bfloat16, graphs
from .report import report

_compile = jit.JITFunction.run
_interpreted: dict = {}


class H200Driver:
    """The parts of Triton's CUDA driver that compilation and autotuning use."""

    class utils:
        @staticmethod
        def get_device_properties(device):
            return dict(
                max_shared_mem=232448,
                max_num_regs=65536,
                multiprocessor_count=132,
                warpSize=32,
                sm_clock_rate=1980000,
                mem_clock_rate=3201000,
                mem_bus_width=6144,
            )

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        return lambda *args, **kwargs: [
            0.0,
            0.0,
            0.0,
        ]  # the autotuner takes the first configuration


def _interpreter_of(fn) -> interpreter.InterpretedFunction:
    if fn not in _interpreted:
        _interpreted[fn] = interpreter.InterpretedFunction(fn)
    return _interpreted[fn]


def _launch(self, *args, grid, warmup, **kwargs):
    """Replace ``JITFunction.run``; kernels that do not compile are reported and interpreted."""
    kernel = report.kernel(f"{self.fn.__module__}.{self.fn.__name__}")
    _mend_aliases(self.fn.__globals__)
    try:
        compiled = _compile(self, *args, grid=grid, warmup=True, **kwargs)
        kernel.variants.add(getattr(compiled, "hash", None))
    except Exception as error:
        kernel.compile_errors.append(f"{error!r} {error.__cause__ or ''}")
    if warmup:
        return

    def interpret() -> None:
        with torch._C.DisableTorchFunction(), np.errstate(all="ignore"):
            named, size = kwargs | dict(zip(self.arg_names, args)), grid
            if callable(grid):  # it may replace arguments, which the interpreter's own call hides
                size = grid(named)
            with _loop_indices(self.fn.__globals__):
                _interpreter_of(self.fn).run(grid=size, warmup=False, **named)
        kernel.runs += 1

    graphs.perform(self.fn.__name__, interpret)


def _mend_aliases(names: dict) -> None:
    """Let a module's own names for parts of the language (``exp = tl.exp``) be interpreted too.

    The interpreter replaces the attributes of ``tl`` alone.
    """
    for name, value in list(names.items()):
        if inspect.isfunction(value) and getattr(tl, value.__name__, None) is value:

            @functools.wraps(value)  # which marks it as a part of the language
            def call(*args, _semantic=None, compiled=value, **kwargs):
                if _semantic is None:
                    return getattr(tl, compiled.__name__)(*args, **kwargs)
                return compiled(*args, _semantic=_semantic, **kwargs)

            names[name] = call


class _LoopIndex(int):
    """Index of a loop, which is a tensor where it is compiled and a number where interpreted."""

    def to(self, dtype):
        return self


@contextmanager
def _loop_indices(names: dict) -> Iterator[None]:
    """Let a kernel's loops have indices with the methods of tensors that kernels call."""
    names["range"] = lambda *bounds: map(_LoopIndex, range(*map(int, bounds)))
    try:
        yield
    finally:
        del names["range"]


def _call_from_kernel(self, *args, **kwargs):
    """Replace ``JITFunction.__call__``, by which an interpreted kernel calls a helper."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return _interpreter_of(self.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def _mend_index_of_scalars() -> None:
    """Convert the interpreter's scalars, arrays of one element, which numpy refuses since 2.4."""
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _patch_the_language_once() -> None:
    """Patch triton.language once a kernel, not again for each helper: a sixth of all time."""
    original = interpreter._patch_lang
    patched: list[set[int]] = []

    class Scope:
        def __init__(self, scope) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.pop()
            self._scope.restore()

    def patch(fn):
        languages = {
            id(value) for value in fn.__globals__.values() if value is tl or value is tl.core
        }
        if patched and languages <= patched[-1]:
            return interpreter._LangPatchScope()
        scope = original(fn)
        patched.append(languages)
        return Scope(scope)

    interpreter._patch_lang = patch


def _give_libdevice_to_interpreter() -> None:
    """Replace libdevice's functions, which return None when interpreted, by numpy's.

    The compiler resolves them by module and name, so compilation is unaffected.
    """

    def interpreted(placeholder):
        @functools.wraps(placeholder)
        def call(*args):
            function = getattr(np, placeholder.__name__, None)
            if function is None:
                raise NotImplementedError(
                    f"numpy has no {placeholder.__name__} to interpret libdevice's"
                )
            values = [getattr(getattr(arg, "handle", arg), "data", arg) for arg in args]
            result = function(*values).astype(values[0].dtype)
            return tl.tensor(interpreter.TensorHandle(result, args[0].handle.dtype), args[0].type)

        return call

    for name, function in inspect.getmembers(libdevice, inspect.isfunction):
        setattr(libdevice, name, interpreted(function))


def _give_dependent_launches_to_interpreter() -> None:
    """Do nothing where an interpreted kernel waits for another, or lets one begin."""
    for name in ("gdc_wait", "gdc_launch_dependents"):
        compiled = getattr(tl.extra.cuda, name)

        @functools.wraps(compiled)  # which marks it as a part of the language
        def call(_semantic=None, compiled=compiled):
            return None if _semantic is None else compiled(_semantic=_semantic)

        setattr(tl.extra.cuda, name, call)


def install() -> None:
    CudaDriver.is_active = staticmethod(lambda: True)
    driver.set_active(H200Driver())
    _mend_index_of_scalars()
    _patch_the_language_once()
    _give_libdevice_to_interpreter()
    _give_dependent_launches_to_interpreter()
    bfloat16.install()
    jit.JITFunction.run = _launch
    jit.JITFunction.__call__ = _call_from_kernel
