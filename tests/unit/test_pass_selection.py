"""Promise: a request's own newest settled token selects, and no draft that level 2 tests; the first
block and the recent ones are read beside what is selected."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION, PassSelection, may_select
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.selection import POLICIES

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 16, 4, 64
BUDGET, RECENT = 8, 2
NUM_SELECTED = BUDGET - RECENT - 1
MOST = 14


def cache_of(policy: str, most: int = BUDGET, num_blocks: int = BLOCKS) -> RetrievalCache:
    """With a budget of ``BUDGET`` blocks, or of an eighth of the context and at most ``most``."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(LAYERS, num_blocks, HEADS, BLOCK, DIM, generator=generator)
    chosen = POLICIES[policy]()
    budget = RetrievalBudget(BUDGET, most, RECENT)
    return RetrievalCache(attention_over(keys), chosen, BLOCK, budget, torch.float32)


def attention_over(keys: torch.Tensor):  # [num_layers, num_blocks, num_kv_heads, block, dim]
    """Return what the cache needs of level 2's attention."""
    num_layers, num_blocks, heads, _, dim = keys.shape

    def summarize(summaries, ids) -> None:
        for kind, kept in summaries.items():
            for layer in range(num_layers):
                kept.write(layer, ids, kind.reduce(keys[layer, ids], 2).transpose(0, 1))

    layer = SimpleNamespace(
        num_kv_heads=heads, head_size=dim, kv_cache=torch.empty(num_blocks, device="meta")
    )
    return SimpleNamespace(layers=[layer] * num_layers, num_kv_heads=heads, summarize=summarize)


def expected_blocks(cache, layer: int, table: np.ndarray, num_full: int, query) -> list[set[int]]:
    """Blocks of each KV head, by votes of a request's queries [1, num_heads, DIM]."""
    num_selected = cache.budget.of(num_full) - RECENT - 1
    ids = torch.from_numpy(table[1 : num_full - RECENT].astype(np.int64))
    blocks = []
    for head in range(HEADS):
        grouped = query.unflatten(1, (HEADS, -1))[:, head].flatten(0, 1)[None]
        keys = {
            kind: kept.dequantize(layer, ids)[head, None] for kind, kept in cache.summaries.items()
        }
        scores = cache.policy.score(grouped, keys, len(ids))
        votes = (scores[0] * DIM**-0.5).softmax(-1).sum(0)
        blocks.append({int(ids[i]) for i in votes.topk(num_selected).indices})
    return blocks


@pytest.mark.parametrize("policy", ["retrieval", "quest"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "rows, query_lens",
    [
        ([0, 1, 2, 3], [1, 1, 1, 1]),
        ([0, 1, 2, 3], [3, 1, 2, 3]),
        ([1, 3], [2, 2]),
        ([0], [4]),
        ([3, 1], [1, 3]),
        ([3, 1, 0], [1, 1, 1]),
    ],
)
@pytest.mark.parametrize(
    "num_fulls, most",
    [
        # Row 2's context fits the budget; the others differ in length, and here in budget.
        ([20, 11, 6, 13], BUDGET),
        ([100, 40, 6, 130], MOST),
        ([40, 130, 6, 100], MOST),
    ],
)
def test_each_request_of_a_pass_has_the_blocks_that_its_newest_token_selects(
    policy, group, rows, query_lens, num_fulls, most
):
    num_blocks = sum(num_fulls) + len(num_fulls)
    cache = cache_of(policy, most, num_blocks)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(num_blocks, generator=generator).int().numpy()
    start = 0
    tables = []
    for num_full in num_fulls:
        tables.append(order[start : start + num_full + 1])
        start += num_full + 1
    selections = [
        cache.selection(str(row), table, num_full * BLOCK + 1)
        for row, (table, num_full) in enumerate(zip(tables, num_fulls))
    ]
    assert [s.summaries is None for s in selections] == [False, False, True, False]
    lens = [num_full * BLOCK + 2 for num_full in num_fulls]
    sparse_tables, _ = cache.block_table(selections, tables, lens)
    before = sparse_tables.clone()
    selection = PassSelection(cache.policy, selections, HEADS)
    pass_tables = sparse_tables[:, rows]
    assert selection.begin_pass(rows, query_lens, [0] * len(rows), pass_tables)
    query = torch.randn(sum(query_lens), HEADS * group, DIM, generator=generator)
    for layer in range(LAYERS):
        selection.select(layer, query + layer)
        for place, (row, part) in enumerate(zip(rows, query.split(query_lens))):
            own = pass_tables[layer, place]
            if selections[row].summaries is None:
                assert torch.equal(own, before[layer, row])
                continue
            newest = part[:1] + layer
            expected = expected_blocks(cache, layer, tables[row], num_fulls[row], newest)
            num_selected = cache.budget.of(num_fulls[row]) - RECENT - 1
            for head in range(HEADS):
                one_head = own[head, 1 : 1 + num_selected] - head
                assert {int(b) // HEADS for b in one_head} == expected[head]
                assert set((one_head % HEADS).tolist()) == {0}
            # Around them are the first block, and the recent ones with the one that is written.
            around = own[:, [0, *range(1 + num_selected, 2 + num_selected + RECENT)]] // HEADS
            blocks = [0, *range(num_fulls[row] - RECENT, num_fulls[row] + 1)]
            assert (around == torch.from_numpy(tables[row][blocks])).all()


@pytest.mark.parametrize("max_round_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 9, 12])
def test_the_host_knows_in_which_rounds_a_request_may_select(max_round_tokens, max_tokens):
    """On Runner V2 the device decides, by lengths that it alone knows."""
    steps = {(0, 0)}  # tokens of a proposal before a round and after it
    for num_rounds in range(max_tokens + 2):
        due = [
            after < max_tokens
            and (not after or after // TOKENS_PER_SELECTION > before // TOKENS_PER_SELECTION)
            for before, after in steps
        ]
        assert may_select(num_rounds, max_round_tokens, max_tokens) == any(due) or not num_rounds
        added = range(1, max_round_tokens + 1)
        steps = {(b, min(b + n, max_tokens)) for _, b in steps if b < max_tokens for n in added}


def test_a_request_selects_at_first_and_after_each_few_tokens():
    cache = cache_of("retrieval")
    tables = [np.arange(start, start + 31, dtype=np.int32) for start in (0, 31)]
    selections = [cache.selection(name, table, 30 * BLOCK) for name, table in zip("ab", tables)]
    sparse, _ = cache.block_table(selections, tables, [30 * BLOCK + 1] * 2)
    selection = PassSelection(cache.policy, selections, HEADS)
    assert selection.begin_pass([0, 1], [2, 1], [0, 0], sparse)
    due = TOKENS_PER_SELECTION
    assert not selection.begin_pass([0, 1], [2, 1], [1, due - 1], sparse)
    assert selection.begin_pass([0, 1], [2, 1], [2, due + 1], sparse)
    assert not selection.begin_pass([1], [1], [2 * due - 1], sparse[:, 1:])
    assert selection.begin_pass([0, 1], [2, 1], [3, 2 * due], sparse)
    before = sparse.clone()
    query = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    for layer in range(LAYERS):
        selection.select(layer, query)
        assert torch.equal(sparse[layer, 0], before[layer, 0])
        expected = expected_blocks(cache, layer, tables[1], 30, query[2:])
        for head in range(HEADS):
            one_head = sparse[layer, 1, head, 1 : 1 + NUM_SELECTED] - head
            assert {int(b) // HEADS for b in one_head} == expected[head]


def test_known_blocks_bring_their_means_along():
    """Requests share the blocks of a cached prefix."""
    cache = cache_of("retrieval")
    updated = []
    cache._attention.summarize = lambda summaries, ids: updated.append(ids.tolist())
    blocks = np.arange(BLOCKS, dtype=np.int32)
    cache.selection("a", blocks, 40 * BLOCK)
    cache.release("a")
    cache.selection("b", blocks, 42 * BLOCK)
    cache.invalidate_summaries([3, 7])
    cache.selection("c", blocks, 42 * BLOCK)
    assert updated == [list(range(40)), [40, 41], [3, 7]]


def test_candidates_are_gathered_again_when_a_block_became_full():
    cache = cache_of("retrieval")
    table = np.arange(BLOCKS, dtype=np.int32)
    first = cache.selection("a", table[:21], 20 * BLOCK)
    assert cache.selection("a", table[:21], 20 * BLOCK + 3) is first
    second = cache.selection("a", table[:22], 21 * BLOCK)
    assert second is not first
    assert len(second.candidates) == len(first.candidates) + 1
    assert all(keys.shape[2] == len(second.candidates) for keys in second.summaries.values())
