"""Devices, memory sizes, streams, events and pinned memory of CUDA, on the CPU.

A tensor created on "cuda" lies on the CPU, and its ``is_cuda`` is False. Moves between host and
device copy, as on a GPU. Work is complete when a call returns, so streams and events do nothing,
and a missing synchronization is not detected.
"""

import collections
import contextlib
import types

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_Generator = torch.Generator
GIB = 1 << 30
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=141 * GIB,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    L2_cache_size=60 << 20,
    is_integrated=False,
)


def _is_device(value) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu")
    )


def to_cpu(device):
    """Replace 'cuda', 'cuda:0', torch.device('cuda') and device indices by the CPU."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class CudaOnCpu(TorchFunctionMode):
    """Rewrites the device arguments of every torch function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_move = func in (torch.Tensor.cuda, torch.Tensor.cpu)
        if func is torch.Tensor.to:
            is_move = _is_device(kwargs.get("device")) or any(_is_device(a) for a in args[1:])
            args = (args[0], *(to_cpu(a) if _is_device(a) else a for a in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)

        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.record_stream:
            return None
        result = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
        if is_move and result is args[0] and type(result) is torch.Tensor:
            return result.clone()  # a move between host and device never shares memory
        return result


class Event:
    def __init__(self, *args, **kwargs):
        self.device = CPU

    def record(self, *args):
        pass

    def synchronize(self):
        pass

    def wait(self, *args):
        pass

    def query(self):
        return True

    def elapsed_time(self, end_event):
        return 1.0


class Runtime:
    """CUDA's runtime, in which all calls succeed."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int):
        return types.SimpleNamespace(value=0)

    def cudaHostUnregister(self, address: int):
        return types.SimpleNamespace(value=0)


class Stream(Event):
    cuda_stream = stream_id = 0

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class _IsAnyGenerator(type(_Generator)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, _Generator)


class Generator(_Generator, metaclass=_IsAnyGenerator):
    def __new__(cls, device="cpu"):
        return _Generator(to_cpu(device))


def _answer(module, **answers) -> None:
    """Replace functions of a module by functions that return a constant."""
    for name, answer in answers.items():
        setattr(module, name, lambda *args, _answer=answer, **kwargs: _answer)


def install() -> None:
    stream = Stream()
    memory = dict(
        memory_allocated=0,
        memory_reserved=0,
        max_memory_allocated=0,
        reset_peak_memory_stats=None,
        memory_stats=collections.defaultdict(int),
        empty_cache=None,
    )
    execution = dict(
        is_available=True, device_count=1, synchronize=None, current_stream=stream, set_stream=None
    )
    _answer(
        torch.cuda,
        **memory,
        **execution,
        _lazy_init=None,
        is_initialized=True,
        current_device=0,
        set_device=None,
        device=contextlib.nullcontext(),
        stream=contextlib.nullcontext(),
        default_stream=stream,
        mem_get_info=(140 * GIB, 141 * GIB),
        get_device_capability=(9, 0),
        get_device_name=PROPERTIES.name,
        get_device_properties=PROPERTIES,
        manual_seed=None,
        manual_seed_all=None,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
        cudart=Runtime(),
    )
    _answer(
        torch.accelerator,
        **memory,
        **execution,
        empty_host_cache=None,
        current_accelerator=torch.device("cuda"),
        current_device_index=0,
        set_device_index=None,
        get_memory_info=(140 * GIB, 141 * GIB),
    )
    torch.Event = torch.cuda.Event = Event
    torch.Stream = torch.cuda.Stream = Stream
    torch.Generator = Generator
    CudaOnCpu().__enter__()
