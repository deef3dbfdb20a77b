"""Measures what a CPU can do: the constants of ``Machine``, none of them typed in.

Bandwidth is a sum over 1 GB; the share of it that weights get a matrix times a vector; arithmetic a
large product of matrices, and the share of it that a few tokens get one with 32 rows. An operation
on a few numbers is timed as a step finds it, its caches emptied by as much memory as a layer's
weights.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from vllm_triforce_bench.predict.machine import Machine

_REPEATS = 5
# Of everything's size, where it is measured how the machine is just then.
_NOW = 0.5


def measure_machine(path: Path, scale: float = 1.0) -> str:
    """Writes the constants of this CPU in float32; about half a minute.

    Args:
        scale: of everything's size; below 1 for a rehearsal.

    Returns:
        What was written.
    """
    text = json.dumps(dataclasses.asdict(_machine(scale, min)), indent=1)
    path.write_text(text + "\n")
    return text


def machine_now(scale: float = 1.0) -> Machine:
    """Typical constants, not the best: other programs, and whoever shares the processor, change
    what a machine can do from minute to minute."""
    return _machine(_NOW * scale, statistics.median)


def between(before: Machine, after: Machine) -> Machine:
    """The geometric mean."""
    values = dataclasses.asdict(before)
    for name, other in dataclasses.asdict(after).items():
        if isinstance(other, float):
            values[name] = (values[name] * other) ** 0.5
    return Machine(**values)


def _machine(scale: float, choose: Callable[[list[float]], float]) -> Machine:
    """
    Args:
        choose: of several times.
    """
    import torch

    from vllm_triforce_bench.predict.cpu_attention import attention_rates

    def timed(run: Callable[[], object]) -> float:
        return choose(times(run, _REPEATS))

    def sized(number: int, least: int = 64) -> int:
        return max(least, int(number * scale))

    stream = torch.ones(sized(250_000_000))
    bandwidth = stream.nbytes / timed(stream.sum)
    matrix, vector = torch.ones(sized(8192), sized(8192)), torch.ones(sized(8192))
    weights = matrix.nbytes / timed(lambda: torch.mv(matrix, vector))
    side, few = sized(2048), 32
    factor = torch.ones(side, side)
    flops = 2 * side**3 / timed(lambda: factor @ factor)
    rows = torch.ones(few, side)
    flops_few = 2 * few * side**2 / timed(lambda: rows @ factor)
    operation = _cold_operation(stream[: sized(16_000_000)])
    read, computed = attention_rates(sized(32_768), timed)
    bandwidth, flops = max(bandwidth, weights), max(flops, flops_few, computed)
    return Machine(
        f"{platform.machine()}, {torch.get_num_threads()} threads",
        float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth,
        flops,
        weights / bandwidth,
        flops_few / flops,
        min(1.0, read / bandwidth),
        computed / flops,
        launch_seconds=operation,
        kernel_seconds=operation,
    )


def times(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds, after a first one."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found[1:]


def _cold_operation(memory) -> float:
    """Seconds of an operation on a few numbers, a few different ones in turn."""
    import torch

    numbers = torch.arange(7.0)
    turns = (
        lambda: numbers + 1,
        lambda: numbers.argmax(),
        lambda: numbers.index_select(0, torch.tensor([1, 2])),
        lambda: torch.cat((numbers, numbers)),
        lambda: numbers.cumsum(0),
    )
    found = []
    for _ in range(4 * _REPEATS):
        memory.sum()
        start = time.perf_counter()
        for operation in turns:
            operation()
        found.append((time.perf_counter() - start) / len(turns))
    return statistics.median(found)
