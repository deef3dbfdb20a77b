"""Promise: whatever a request did since its last selection, all blocks that became full are
summarised for the next one, and nobody else's."""

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import VOCAB_SIZE, init_rows
from vllm_triforce.config import TriForceConfig
from vllm_triforce.kernels.row_table import Refresh
from vllm_triforce.kernels.rows import RowLimits, Rows
from vllm_triforce.runner_v2 import selections
from vllm_triforce.runner_v2.batch import Slots

BLOCK, WIDTH, NUM_KV_HEADS, NUM_LAYERS, HEAD_DIM = 16, 200, 2, 1, 8


class Attention:
    """Attention that notes which blocks are summarized."""

    def __init__(self) -> None:
        self.summarised: list[tuple[list[int], int]] = []

    def update_summaries(self, summaries, tables, first, last, max_blocks) -> None:
        for table, start, end in zip(tables.tolist(), first.tolist(), last.tolist()):
            assert end - start <= max_blocks, "blocks beyond the bound are left out"
            self.summarised.append((table[start:end], max_blocks))

    def head_strides(self) -> tuple[int, int]:
        return NUM_KV_HEADS, 1


@pytest.fixture
def world():
    config = TriForceConfig(
        retrieval_budget=128,
        num_speculative_tokens=6,
        gamma=2,
        min_context=0,
        refresh_interval=4,
        prompt_lookup_max=3,
    )
    config = config.with_defaults(can_adapt=False).resolve(BLOCK)
    limits = RowLimits(0, BLOCK, config.budget, config.table_width)
    rows = Rows(4, 6, 2, VOCAB_SIZE, limits, DEVICE)
    queries = torch.zeros(NUM_LAYERS, 4, 2 * NUM_KV_HEADS, HEAD_DIM, device=DEVICE)
    attention = Attention()
    tables = torch.zeros(4, WIDTH, dtype=torch.int32, device=DEVICE)
    made = selections.SelectionsV2(
        config, attention, queries, 4 * WIDTH, NUM_KV_HEADS, rows, tables
    )
    return made, rows, attention, Slots(4)


def select(world, lengths: dict[str, int]) -> list[Refresh]:
    """Run a proposal of level 2 for requests of these lengths."""
    made, rows, attention, slots = world
    attention.summarised.clear()
    newest = np.array(list(lengths.values()))
    taken = [slots.take(name) for name in lengths]
    due = made.schedule_refresh(taken, newest)
    count = len(lengths)
    init_rows(rows, newest.tolist(), SLOT=[slot.index for slot in taken], REFRESH=due)
    own = torch.arange(count * WIDTH, dtype=torch.int32, device=DEVICE).view(count, WIDTH)
    batch = type("Batch", (), {})()
    batch.max_computed_tokens = newest
    made.refresh(batch, own, taken, due)
    return due


def blocks(attention: Attention) -> list[list[int]]:
    return [found for found, _ in attention.summarised]


def test_blocks_that_became_full_by_another_route_are_summarised(world):
    attention = world[2]
    select(world, {"a": 1000})
    assert blocks(attention) == [list(range(62))]
    # Behind 1,500 tokens that were proposed straight, or decoded plainly.
    assert select(world, {"a": 2500}) == [Refresh.DUE]
    assert blocks(attention) == [list(range(62, 156))]
    assert select(world, {"a": 2510}) == [Refresh.NOT_DUE]
    assert blocks(attention) == []


def test_a_new_request_does_not_make_work_for_the_others(world):
    """One launch for all would run as many programs per row as the longest needs."""
    attention = world[2]
    select(world, {"a": 1000, "b": 500})
    for length in range(1007, 1022, 7):
        assert set(select(world, {"a": length, "b": length - 500})) == {Refresh.NOT_DUE}
    due = select(world, {"a": 1028, "b": 528, "c": 2000})
    assert due == [Refresh.DUE, Refresh.DUE, Refresh.NEW_OWNER]
    by_size = sorted((len(found), most) for found, most in attention.summarised)
    assert [size for size, _ in by_size] == [2, 2, 125]
    assert [most < 10 for _, most in by_size] == [True, True, False]
