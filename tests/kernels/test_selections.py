"""Promise: whatever a request did since level 2's last proposal, all blocks that became full are
summarised for the next one, and nobody else's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import VOCAB_SIZE, config_of, init_rows
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.kernels.row_table import Owner
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import Slots
from vllm_triforce.runner_v2.selections import PolicySelection, SelectionsV2
from vllm_triforce.selection import SelectionPolicy

BLOCK, WIDTH, NUM_KV_HEADS, HEAD_DIM = 16, 200, 2, 8


class Attention:
    """Attention that notes which blocks are summarized."""

    layers = [SimpleNamespace(num_kv_heads=NUM_KV_HEADS, num_heads=4, head_size=HEAD_DIM)]

    def __init__(self) -> None:
        self.summarised: list[tuple[list[int], int]] = []

    def update_summaries(self, summaries, tables, first, last, max_blocks) -> None:
        for table, start, end in zip(tables.tolist(), first.tolist(), last.tolist()):
            assert end - start <= max_blocks, "blocks beyond the bound are left out"
            self.summarised.append((table[start:end], max_blocks))

    def chunk_ids(self) -> ChunkIds:
        return ChunkIds(NUM_KV_HEADS, 1)


@pytest.fixture
def world():
    config = TriForceConfig(
        retrieval_budget=128, num_speculative_tokens=6, gamma=2, min_context=0, prompt_lookup_max=3
    )
    config = config.with_defaults(can_adapt=False).resolve(BLOCK)
    rows = Rows(config, 4, VOCAB_SIZE, DEVICE)
    attention = Attention()
    tables = torch.zeros(4, WIDTH, dtype=torch.int32, device=DEVICE)
    return SelectionsV2(config, attention, 4 * WIDTH, rows, tables), rows, attention, Slots(4)


def propose(world, lengths: dict[str, int]) -> None:
    """Run a proposal of level 2 for requests of these lengths."""
    made, rows, attention, slots = world
    attention.summarised.clear()
    newest = np.array(list(lengths.values()))
    owners = [Owner.SAME_OWNER if name in slots else Owner.NEW_OWNER for name in lengths]
    taken = [slots.take(name) for name in lengths]
    count = len(lengths)
    init_rows(rows, newest.tolist(), SLOT=[slot.index for slot in taken], OWNER=owners)
    own = torch.arange(count * WIDTH, dtype=torch.int32, device=DEVICE).view(count, WIDTH)
    made.begin(SimpleNamespace(max_computed_tokens=newest), own, taken, owners)


def blocks(attention: Attention) -> list[list[int]]:
    return [found for found, _ in attention.summarised]


def test_blocks_that_became_full_by_another_route_are_summarised(world):
    attention = world[2]
    propose(world, {"a": 1000})
    assert blocks(attention) == [list(range(62))]
    # Behind 1,500 tokens that were proposed straight, or decoded plainly.
    propose(world, {"a": 2500})
    assert blocks(attention) == [list(range(62, 156))]
    propose(world, {"a": 2510})
    assert blocks(attention) == [[]]


def test_a_new_request_does_not_make_work_for_the_others(world):
    """One launch for all would run as many programs per row as the longest needs."""
    attention = world[2]
    propose(world, {"a": 1000, "b": 500})
    propose(world, {"a": 1024, "b": 524, "c": 2000})
    by_size = sorted((len(found), most) for found, most in attention.summarised)
    assert [size for size, _ in by_size] == [1, 2, 125]
    assert [most < 10 for _, most in by_size] == [True, True, False]


class OfAGroup(SelectionPolicy):
    """Wants one chunk, and none of the others."""

    name = "of-a-group"

    def score(self, query, summaries, num_chunks):
        scores = torch.full((*query.shape[:-2], 1, num_chunks), float("-inf"), device=query.device)
        scores[..., 7] = 1.0
        return scores


def test_a_policy_that_wants_few_chunks_selects_none_of_the_tail():
    """The tail has the drafts that the pass tests, and selected blocks are read as a whole."""
    config = config_of(2, block_size=BLOCK, budget=RetrievalBudget(8, 8, 2), table_width=12)
    rows = Rows(config, 2, VOCAB_SIZE, DEVICE)
    init_rows(rows, [20 * BLOCK])
    tables = torch.arange(2 * WIDTH, dtype=torch.int32, device=DEVICE).view(2, WIDTH).flip(1)
    sparse = torch.full((1, 2 * NUM_KV_HEADS, 12), -1, dtype=torch.int32, device=DEVICE)
    parts = rows, tables.contiguous(), sparse, 4, 3, ChunkIds(NUM_KV_HEADS, 1), 6
    PolicySelection(OfAGroup(), {}, *parts).select(0, torch.zeros(6, 4, HEAD_DIM, device=DEVICE))
    candidates = tables[0, 1:18].tolist()
    for head in range(NUM_KV_HEADS):
        selected = [(block - head) // NUM_KV_HEADS for block in sparse[0, head, 1:6].tolist()]
        assert tables[0, 7] in selected and set(selected) <= set(candidates)
        assert len(set(selected)) == 5
