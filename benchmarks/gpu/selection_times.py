"""Time a layer's selection inside level 2's pass: its two launches, in CUDA graphs.

    python -m benchmarks.gpu.selection_times

It fails unless the chunks are those with the most votes, up to two at the edge.
"""

from collections.abc import Callable
from statistics import median

import torch

from tests.kernels.tensors import some_rows
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.kernels.pass_selection import PassSelectionV2

HEAD_DIM = 128
# KV heads, query heads of each, chunks, requests.
SHAPES = ((8, 4, 7600, 1), (32, 1, 5000, 1), (9, 1, 470, 32))


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


def selection_us(num_heads: int, group: int, num_chunks: int, num_rows: int) -> float:
    """Return the microseconds of selecting an eighth of the chunks, at most 256."""
    device = torch.device("cuda")
    num_selected = min(256, num_chunks // 8)
    means = QuantizedSummaries.allocate((1, num_heads, num_chunks * num_rows, HEAD_DIM), device)
    means.values.random_(-127, 127)
    means.scales.uniform_(0.001, 0.02)
    rows = some_rows(
        num_rows,
        gamma=1,
        tail=[num_chunks] * num_rows,
        num_selected=[num_selected] * num_rows,
        room=[1] * num_rows,
    )
    tables = torch.zeros(rows.max_rows, num_chunks, dtype=torch.int32, device=device)
    tables[:num_rows] = torch.randperm(num_rows * num_chunks, device=device).view(num_rows, -1)
    shape = (1, rows.max_rows * num_heads, num_selected + 4)
    selected = torch.full(shape, -1, dtype=torch.int32, device=device)
    selection = PassSelectionV2(means, rows, tables, selected, num_heads * group, 1, (1, 0))
    query = torch.randn(num_rows, num_heads * group, HEAD_DIM, device=device, dtype=torch.bfloat16)
    selection.select(0, query)
    check(selection, tables, selected, num_rows, num_heads, num_selected)

    return graph_us(lambda: selection.select(0, query))


def check(selection, tables, selected, num_rows: int, num_heads: int, num_selected: int) -> None:
    votes = selection._votes[:num_rows, :, : tables.shape[1]].clone()
    votes[:, :, 0] = -1  # the first chunk is always read
    best = votes.topk(num_selected - 1).indices
    for row in range(num_rows):
        for head in range(num_heads):
            written = selected[0, row * num_heads + head, 1:num_selected].tolist()
            wanted = tables[row, best[row, head]].tolist()
            assert len(set(written) ^ set(wanted)) <= 4, (row, head)


if __name__ == "__main__":
    print("KV heads, query heads of each, chunks, requests: microseconds")
    for shape in SHAPES:
        print(f"{shape}: {selection_us(*shape):.1f}")
