"""Each kernel of level 2's retrieval equals its oracle, on every layout and odd sizes."""

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.device import DEVICE
from tests.kernels.tensors import some_rows
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.kernels.retrieval import KeyPointers, build_sparse_tables, update_chunk_summaries
from vllm_triforce.selection import Summary


def make_cache(layout: str, num_blocks: int, heads: int, block_size: int, dim: int, dtype):
    """Make keys and values [num_blocks, block_size, heads, dim], packed as vLLM packs them."""
    if layout == "head-major":
        packed = torch.randn(num_blocks, heads, block_size, 2 * dim)
        cache = packed.to(dtype).to(DEVICE)
    else:
        packed = torch.randn(num_blocks, block_size, heads, 2 * dim)
        cache = packed.to(dtype).to(DEVICE).transpose(1, 2)
    return cache.transpose(1, 2).split(dim, dim=-1)


@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@pytest.mark.parametrize(
    ("block_size", "dim", "heads", "dtype"),
    [
        (16, 64, 2, torch.float32),
        (32, 128, 1, torch.bfloat16),
        (16, 64, 3, torch.float16),
        (48, 80, 2, torch.float32),
        (16, 64, 2, torch.float8_e4m3fn),
    ],
)
def test_chunk_summaries(layout, block_size, dim, heads, dtype):
    """Newly full blocks of each request, and no others, get their summaries."""
    torch.manual_seed(0)
    keys = [make_cache(layout, 13, heads, block_size, dim, dtype)[0] for _ in range(2)]
    scales = [1.0, 0.5]
    tables = torch.tensor([[3, 5, 1, 9], [12, 2, 0, 0], [4, 0, 0, 0]], dtype=torch.int32)
    first, last = [1, 0, 0], [4, 1, 0]  # three newly full blocks, one, and none
    for kind in Summary:
        summaries = QuantizedSummaries.allocate((2, heads, 13, dim), DEVICE)
        summaries.values.fill_(7), summaries.scales.fill_(1)
        update_chunk_summaries(
            KeyPointers(keys, scales, keys[0].shape[1]),
            kind,
            summaries,
            tables.to(DEVICE),
            torch.tensor(first, dtype=torch.int32, device=DEVICE),
            torch.tensor(last, dtype=torch.int32, device=DEVICE),
            max_blocks=3,
        )
        expected = torch.full((2, heads, 13, dim), 7.0)
        for table, begin, end in zip(tables.tolist(), first, last):
            for block in table[begin:end]:
                for layer in range(2):
                    for head in range(heads):
                        own = keys[layer][block, :, head].cpu()
                        expected[layer, head, block] = oracles.chunk_summary(
                            own, scales[layer], kind
                        )
        every = torch.arange(13, device=DEVICE)
        found = torch.stack([summaries.dequantize(layer, every) for layer in range(2)]).cpu()
        written = expected != 7
        assert bool((found[~written] == 7).all())
        half_a_step = expected.abs().amax(-1, keepdim=True) / 254 + 1e-5
        assert bool(((found - expected).abs() <= half_a_step)[written].all())


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize(
    "ids", [ChunkIds(8, 1), ChunkIds(16 * 8, 2), ChunkIds(40, 5, 1, split=5)], ids=str
)
def test_sparse_tables(heads, ids):
    torch.manual_seed(2)
    num_layers, width = 2, 9
    tables = torch.randint(1, 100, (3, 20), dtype=torch.int32)
    num_selected, tails, num_blocks = [5, 0, 2], [11, 0, 2], [14, 1, 20]
    out = torch.full((num_layers, 4 * heads, width), -1, dtype=torch.int32, device=DEVICE)

    rows = some_rows(3, gamma=2, num_selected=num_selected, tail=tails, num_blocks=num_blocks)
    build_sparse_tables(out, rows, tables.to(DEVICE), ids)
    for layer in range(num_layers):
        for row in range(3):
            for head in range(heads):
                own = tables[row, : num_selected[row]].tolist()
                expected = oracles.sparse_table(
                    own, tables[row].tolist(), tails[row], num_blocks[row], width, head, ids
                )
                assert out[layer, row * heads + head].tolist() == expected
    assert (out[:, 3 * heads :] == -1).all(), "rows that are not there"
