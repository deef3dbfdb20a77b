"""Memory taken at start-up: where it fails, the error says how much, for what and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_GIB = 1 << 30


@contextmanager
def checked_allocation(
    what: str, num_bytes: int, device: torch.device, remedy: str
) -> Iterator[None]:
    """Around an allocation of ``num_bytes``.

    Raises:
        MemoryError: the allocator refused; or, on the CPU, less is available than is needed,
            which Linux would grant first and then end the process for.
    """
    size = f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 100 else f"{num_bytes} bytes"
    if device.type == "cpu" and num_bytes > (available := psutil.virtual_memory().available):
        raise MemoryError(
            f"{what} needs {size} beside the KV cache, but {available / _GIB:.2f} GiB of memory "
            f"are available; {remedy}"
        )
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemoryError(
            f"{what} needs {size} beside the KV cache, which could not be allocated on {device} "
            f"({reason}); {remedy}"
        ) from error
