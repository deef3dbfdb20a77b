"""Allocation at start-up whose errors name the size, the purpose and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_GIB = 1 << 30


@contextmanager
def checked_allocation(
    purpose: str, num_bytes: int, device: torch.device, remedy: str
) -> Iterator[None]:
    """Explain a failed allocation of ``num_bytes`` within the context.

    Args:
        purpose: use of the memory, as the subject of the message.
        remedy: ways to need less, as an imperative.

    Raises:
        MemoryError: the allocator refused, or, on the CPU, too little memory is available. Linux
            would grant such memory and later kill the process.
    """
    size = f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 100 else f"{num_bytes} bytes"
    if device.type == "cpu" and num_bytes > (available := psutil.virtual_memory().available):
        raise MemoryError(
            f"{purpose} needs {size} beside the KV cache, but {available / _GIB:.2f} GiB of memory "
            f"are available; {remedy}"
        )
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemoryError(
            f"{purpose} needs {size} beside the KV cache, which could not be allocated on {device} "
            f"({reason}); {remedy}"
        ) from error
