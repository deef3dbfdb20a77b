"""Time of launches in a CUDA graph."""

from collections.abc import Callable
from statistics import median

import torch


def graph_us(launch: Callable[[], object], num_launches: int = 16, num_replays: int = 5) -> float:
    """Return the median microseconds of a launch, of ``num_launches`` captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiled, and with its scratch memory
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_launches):
            launch()
    graph.replay()
    times = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / num_launches)
    return median(times)
