"""Kernels of a KV cache in host memory, against plain copies."""

import pytest
import torch

from tests.kernels.device import DEVICE, needs_triton

if needs_triton.mark.args[0]:
    pytest.skip(needs_triton.mark.kwargs["reason"], allow_module_level=True)

from tests.kernels.tensors import integers, some_rows
from vllm_triforce.kernels.refill_pool import PoolRefill
from vllm_triforce.kernels.row_metadata import Refresh, RowColumn
from vllm_triforce.kernels.rows import PassInputs
from vllm_triforce.kernels.stage_blocks import stage_blocks


def caches(count: int, heads: int, block_size: int, size: int, dtype, layout: str) -> torch.Tensor:
    """[count, heads, block_size, size] of numbers that tell where they lie."""
    shape = (count, heads, block_size, size)
    if layout == "token-major":
        shape = (count, block_size, heads, size)
    made = torch.arange(count * heads * block_size * size, device=DEVICE)
    made = (made % 251).view(shape).to(dtype)
    return made if layout == "head-major" else made.transpose(1, 2)


LAYOUTS = pytest.mark.parametrize("layout", ["head-major", "token-major"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("heads, block_size, size", [(1, 16, 24), (3, 16, 8), (2, 32, 40)])
def test_each_block_that_is_read_is_staged_where_it_was(heads, block_size, size, dtype, layout):
    host = caches(23, heads, block_size, size, dtype, layout)
    staging = torch.full_like(host, 252)
    assert staging.stride() == host.stride()
    tables = integers([[3, 9, 1, 20], [4, 3, 0, 0], [7, 8, 0, 0], [11, 0, 0, 0]])
    # Whole blocks, a part of one, one token more than a block, a padded row.
    lens = [3 * block_size + 1, 2 * block_size, 1, 0]
    stage_blocks(host, staging, tables, integers(lens), block_size)
    read = {3, 9, 1, 20, 4, 7}
    for block in range(23):
        wanted = host[block] if block in read else torch.full_like(host[block], 252)
        assert torch.equal(staging[block], wanted), block


WIDTH, BLOCK, HEADS, SIZE = 7, 16, 2, 10


@pytest.fixture(params=["head-major", "token-major"])
def world(request):
    """Three layers, of which the last two lie in host memory; four slots."""
    per = (HEADS, 1) if request.param == "head-major" else (BLOCK * HEADS, 1)
    hosts = [
        caches(60, HEADS, BLOCK, SIZE, torch.float32, request.param) + 1000 * i for i in (1, 2)
    ]
    pools = [
        torch.full_like(caches(4 * WIDTH, HEADS, BLOCK, SIZE, torch.float32, request.param), -1.0)
        for _ in hosts
    ]
    refill = PoolRefill(hosts, pools, 1, 4, WIDTH, per, torch.device(DEVICE))
    return refill, hosts, pools, per


def tables_of(rows_of_blocks, per) -> torch.Tensor:
    """[3 layers, 3 * HEADS, WIDTH]: each head's blocks differ by the layer and the head."""
    made = torch.zeros(3, 3 * HEADS, WIDTH, dtype=torch.int32)
    for layer in range(3):
        for row, (selected, tail) in enumerate(rows_of_blocks):
            for head in range(HEADS):
                blocks = [(b + 5 * layer + 2 * head) % 30 for b in selected] + tail
                ids = [b * per[0] + head * per[1] for b in blocks]
                made[layer, row * HEADS + head, : len(ids)] = integers(ids).cpu()
    return made.to(DEVICE)


def block_of(cache: torch.Tensor, one_head: int, head: int, per) -> torch.Tensor:
    return cache[(one_head - head * per[1]) // per[0], head]


def test_the_pool_has_what_is_selected_and_the_tail_as_far_as_it_is_exact(world):
    refill, hosts, pools, per = world
    rows = some_rows(2, gamma=2, computed=[16 * 10 + 3, 16 * 6], tail=[8, 4], num_selected=[3, 2])
    rows.row_metadata[:2, RowColumn.SLOT] = integers([2, 0])
    rows.row_metadata[:2, RowColumn.REFRESH] = Refresh.NEW_OWNER
    # The first has three blocks behind its tail's start, the last with three tokens; and one more
    # that is allocated and has nothing.
    tables = tables_of([([1, 2, 3], [40, 41, 42, 43]), ([4, 5], [50, 51, 52])], per)
    refill(rows, tables)
    for layer, (host, pool) in enumerate(zip(hosts, pools)):
        for row, (slot, used) in enumerate(((2, 6), (0, 4))):
            for head in range(HEADS):
                for index in range(WIDTH):
                    found = pool[slot * WIDTH + index, head]
                    if index >= used:
                        assert (found == -1).all()
                        continue
                    wanted = int(tables[1 + layer, row * HEADS + head, index])
                    assert torch.equal(found, block_of(host, wanted, head, per))
        for slot in (1, 3):
            assert (pool[slot * WIDTH : (slot + 1) * WIDTH] == -1).all()
    assert refill.exact.tolist() == [96, 0, 163, 0]


def test_only_what_changed_is_brought_again(world):
    """What level 2 has written to the tail, what is selected anew, and all of a new owner's."""
    refill, hosts, pools, per = world
    rows = some_rows(1, gamma=2, computed=[16 * 10 + 3], tail=[8], num_selected=[3])
    rows.row_metadata[0, RowColumn.REFRESH] = Refresh.NEW_OWNER
    tables = tables_of([([1, 2, 3], [40, 41, 42, 43])], per)
    refill(rows, tables)
    for host in hosts:
        host += 0.5  # whatever is brought from now on shows it
    rows.computed[0] = 16 * 11 + 2  # from the block of token 163 on it may be level 2's
    rows.row_metadata[0, RowColumn.REFRESH] = Refresh.NOT_DUE
    again = tables.clone()
    again[2, 1, 1] = 33 * per[0] + per[1]  # the second layer's second head selects another chunk
    refill(rows, again)
    for layer, pool in enumerate(pools):
        for head in range(HEADS):
            new = [bool((pool[index, head] % 1 == 0.5).all()) for index in range(WIDTH)]
            selected = [False, (layer, head) == (1, 1), False]
            assert new == [*selected, False, False, True, True]
    rows.row_metadata[0, RowColumn.REFRESH] = Refresh.NEW_OWNER
    refill(rows, again)
    for pool in pools:
        assert (pool[:WIDTH] % 1 == 0.5).all()


def test_level_2_writes_behind_what_its_slot_has():
    rows = some_rows(
        3,
        gamma=2,
        computed=[16 * 10 + 14, 40, 0],
        length=[1, 0, 0],
        room=[6, 6, 0],
        tail=[8, 1, 0],
        num_selected=[3, 1, 0],
        num_drafted=[2, 2, 2],
    )
    rows.count.fill_(3)
    rows.row_metadata[:3, RowColumn.SLOT] = integers([2, 0, 1])
    inputs = PassInputs(4, 3, 4 * HEADS, DEVICE)
    places = torch.full((12,), 99, dtype=torch.int64, device=DEVICE)
    tables = torch.zeros(3, 40, dtype=torch.int32, device=DEVICE)
    rows.feed_target(inputs, 4, tables, integers([0] * 4), BLOCK, 4095, HEADS, places, WIDTH)
    # Token 175 is the last of block 10, the sixth that the slot has; the next are the seventh's.
    first = 2 * WIDTH * BLOCK
    assert places[:3].tolist() == [first + 5 * 16 + 15, first + 6 * 16, first + 6 * 16 + 1]
    assert places[3:6].tolist() == [2 * 16 + 8, 2 * 16 + 9, 2 * 16 + 10]
    assert places[6:].tolist() == [-1] * 6, "nothing to verify, and a padded row"
