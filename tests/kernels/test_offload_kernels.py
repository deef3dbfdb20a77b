"""Kernels of a KV cache in host memory, against plain copies."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import counted, integers, new_counters, some_rows
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.kernels.offload import RetrievalPool, stage_blocks
from vllm_triforce.kernels.pass_inputs import PassInputs, prepare_target_inputs
from vllm_triforce.kernels.row_table import Owner, RowColumn, SlotColumn
from vllm_triforce.metrics.counters import DeviceCounter


def caches(count: int, heads: int, block_size: int, size: int, dtype, layout: str) -> torch.Tensor:
    """Make [count, heads, block_size, size] of numbers that tell where they lie."""
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
    counters = new_counters()
    stage_blocks(host, staging, tables, integers(lens), block_size, counters)
    assert_staged(staging, host, {3, 9, 1, 20, 4, 7})
    # One that two requests read is brought for each.
    page = heads * block_size * size * host.element_size()
    assert counted(counters) == {DeviceCounter.NUM_STAGED_BYTES: 7 * page}


def assert_staged(staging, host, read: set[int]) -> None:
    for block in range(len(host)):
        wanted = host[block] if block in read else torch.full_like(host[block], 252)
        assert torch.equal(staging[block], wanted), block


WIDTH, BLOCK, HEADS, SIZE = 11, 16, 2, 10
SELECTED = 5
BYTES = BLOCK * SIZE * 4


class World:
    """Three layers, of which the last two lie in host memory; four slots."""

    def __init__(self, layout: str) -> None:
        self.per = (HEADS, 1) if layout == "head-major" else (BLOCK * HEADS, 1)
        made = caches(60, HEADS, BLOCK, SIZE, torch.float32, layout)
        self.hosts = [made + 1000 * layer for layer in (1, 2)]
        empty = torch.full_like(caches(4 * WIDTH, HEADS, BLOCK, SIZE, torch.float32, layout), -1.0)
        self.pools = [empty.clone() for _ in self.hosts]
        self.counters = new_counters()
        self._pool: RetrievalPool | None = None

    def refill(self, rows, tables) -> None:
        """Begin a proposal of ``rows``, the same in all calls, and select in its first pass."""
        if self._pool is None:
            self._tables = torch.zeros_like(tables)
            self._pool = RetrievalPool(
                self.hosts,
                self.pools,
                self._tables,
                ChunkIds(*self.per),
                SELECTED,
                self,
                self.counters,
                rows,
            )
        self._tables.copy_(tables)
        self._pool.begin()
        for layer in range(3):
            assert self._pool.select(layer, torch.zeros(3 * rows.num_rows, 1, 1)) == layer
        # Each row's places are those of its slot, and its heads'.
        blocks = torch.arange(4 * WIDTH, dtype=torch.int32, device=DEVICE).view(4, WIDTH)
        heads = torch.arange(HEADS, dtype=torch.int32, device=DEVICE)[:, None]
        slots = rows.row_metadata[: rows.num_rows, RowColumn.SLOT].long()
        expected = blocks[slots][:, None] * self.per[0] + heads * self.per[1]
        assert torch.equal(self._pool.tables[: rows.num_rows * HEADS], expected.flatten(0, 1))

    def select(self, layer: int, query: torch.Tensor) -> int:
        """Select the blocks that are in the tables already."""
        return layer

    def tables(self, rows_of_blocks) -> torch.Tensor:
        """Make [3 layers, 3 * HEADS, WIDTH]; selections differ by layer and head."""
        made = torch.zeros(3, 3 * HEADS, WIDTH, dtype=torch.int32)
        for layer in range(3):
            for row, (selected, tail) in enumerate(rows_of_blocks):
                for head in range(HEADS):
                    blocks = [(b + 5 * layer + 2 * head) % 30 for b in selected] + tail
                    ids = [self.one_head(b, head) for b in blocks]
                    made[layer, row * HEADS + head, : len(ids)] = integers(ids).cpu()
        return made.to(DEVICE)

    def one_head(self, block: int, head: int) -> int:
        return block * self.per[0] + head * self.per[1]

    def in_host(self, layer: int, one_head: int, head: int) -> torch.Tensor:
        return self.hosts[layer][(one_head - head * self.per[1]) // self.per[0], head]

    def check(self, tables, row: int, slot: int, num_selected: int, num_used: int) -> None:
        """Compare a slot with its row's table: selected blocks in any order, the rest in order."""
        for layer, pool in enumerate(self.pools):
            for head in range(HEADS):
                ids = tables[1 + layer, row * HEADS + head].tolist()
                wanted = [self.in_host(layer, its, head) for its in ids[:num_used]]
                found = [pool[slot * WIDTH + index, head] for index in range(num_used)]
                left = list(range(num_selected))
                for block in found[:num_selected]:
                    left.remove(next(i for i in left if torch.equal(wanted[i], block)))
                assert not left
                for one, other in zip(wanted[num_selected:], found[num_selected:]):
                    assert torch.equal(one, other)


@pytest.fixture(params=["head-major", "token-major"])
def world(request) -> World:
    return World(request.param)


def test_the_pool_has_selected_blocks_and_the_exact_tail(world):
    lengths = dict(computed=[16 * 10 + 3, 16 * 6], tail=[8, 4], num_selected=[3, 2])
    rows = some_rows(2, gamma=2, room=[6, 6], **lengths)
    rows.row_metadata[:2, RowColumn.SLOT] = integers([2, 0])
    rows.row_metadata[:2, RowColumn.OWNER] = Owner.NEW_OWNER
    # The first has three blocks behind its tail's start, the last with three tokens; and one more
    # that is allocated and has nothing.
    tables = world.tables([([1, 2, 3], [40, 41, 42, 43]), ([4, 5], [50, 51, 52])])
    world.refill(rows, tables)
    for row, slot, num_selected, num_used in ((0, 2, 3, 6), (1, 0, 2, 4)):
        world.check(tables, row, slot, num_selected, num_used)
        for pool in world.pools:
            assert (pool[slot * WIDTH + num_used : (slot + 1) * WIDTH] == -1).all()
    for pool in world.pools:
        for slot in (1, 3):
            assert (pool[slot * WIDTH : (slot + 1) * WIDTH] == -1).all()
    assert rows.table[:, SlotColumn.NUM_EXACT].tolist() == [96, 0, 163]
    assert counted(world.counters) == {
        DeviceCounter.NUM_POOL_BLOCKS: 10 * 2 * HEADS,
        DeviceCounter.NUM_POOL_BYTES: 10 * 2 * HEADS * BYTES,
    }


@pytest.mark.parametrize("seed", range(2))
def test_chunks_that_stay_selected_are_not_brought_again(world, seed):
    """Change the selection at random while the context grows and level 2 overwrites."""
    draw = random.Random(seed)
    rows = some_rows(1, gamma=2, room=[6], tail=[0], num_selected=[0])
    rows.row_metadata[0, RowColumn.OWNER] = Owner.NEW_OWNER
    computed, before = 20 + draw.randrange(30), set()
    for step in range(12):
        tail = max(0, computed // BLOCK - 2)
        num_selected = min(tail, SELECTED)
        num_used = num_selected + -(-computed // BLOCK) - tail
        selected = draw.sample(range(tail), num_selected)
        tables = torch.zeros(3, 3 * HEADS, WIDTH, dtype=torch.int32, device=DEVICE)
        for head in range(HEADS):
            blocks = [*selected, *range(tail, tail + WIDTH - num_selected)]
            tables[:, head] = integers([world.one_head(block, head) for block in blocks])
        rows.computed[0], rows.tail[0], rows.num_selected[0] = computed, tail, num_selected
        if step == 6:  # the slot is another's, of whom nothing is there
            rows.row_metadata[0, RowColumn.OWNER], before = Owner.NEW_OWNER, set()
            for host in world.hosts:
                host += 0.5
        world.counters.zero_()
        world.refill(rows, tables)
        world.check(tables, 0, 0, num_selected, num_used)
        counts = counted(world.counters)
        num_brought = counts.get(DeviceCounter.NUM_POOL_BYTES, 0) // BYTES
        num_hits = counts.get(DeviceCounter.NUM_POOL_HITS, 0)
        assert num_brought + num_hits == counts[DeviceCounter.NUM_POOL_BLOCKS]
        if step:
            new = len(set(selected) - before)
            assert num_brought <= 2 * HEADS * (new + num_used - num_selected)
        rows.row_metadata[0, RowColumn.OWNER] = Owner.SAME_OWNER
        # Where the newest tokens and those behind them go, level 2 writes.
        for pool in world.pools:
            pool[num_selected + computed // BLOCK - tail : WIDTH] = -7.0
        before, computed = set(selected), min(computed + draw.randrange(1, 40), 25 * BLOCK)
    rows.room[0], kept = 0, [pool[:num_selected].clone() for pool in world.pools]
    world.refill(rows, tables.flip(2))
    now = [pool[:num_selected] for pool in world.pools]
    assert all(map(torch.equal, kept, now)), "it does not propose"


def test_level_2_writes_behind_its_slots_blocks():
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
    pool = SimpleNamespace(slot_mapping=places, width=WIDTH)
    prepare_target_inputs(rows, inputs, 4, tables, integers([0] * 4), BLOCK, 4095, pool)
    # Token 175 is the last of block 10, the sixth that the slot has; the next are the seventh's.
    first = 2 * WIDTH * BLOCK
    assert places[:3].tolist() == [first + 5 * 16 + 15, first + 6 * 16, first + 6 * 16 + 1]
    assert places[3:6].tolist() == [2 * 16 + 8, 2 * 16 + 9, 2 * 16 + 10]
    assert places[6:].tolist() == [-1] * 6, "nothing to verify, and a padded row"
