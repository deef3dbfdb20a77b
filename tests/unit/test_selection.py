"""Promise: every policy selects what it says; the retrieval cache hands level 2 the right blocks.

The matrix runs each policy in ``POLICIES`` over odd sizes; a policy added there is tested here.
"""

import numpy as np
import pytest
import torch

from tests.kernels.tensors import some_rows
from vllm_triforce.cache.key_layout import probe_key_order
from vllm_triforce.cache.pass_selection import PassSelection
from vllm_triforce.cache.retrieval_cache import Candidates, RetrievalCache
from vllm_triforce.cache.summaries import ChunkSummaries, QuantizedSummaries
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.runner_v2.selections import PolicySelection
from vllm_triforce.selection import POLICIES, Summary
from vllm_triforce.selection.quest import QuestPolicy
from vllm_triforce.selection.retrieval import RetrievalPolicy

BLOCK = 32
CPU = torch.device("cpu")
BUDGET = RetrievalBudget(8, 8, recent=2)


@pytest.mark.parametrize("group", [1, 3])
def test_quest_bounds_the_product_of_every_key(group):
    """The bound is reached by a key of each dimension's better end."""
    keys, query = torch.randn(2, 3, 9, 5, 16), torch.randn(2, 3, group, 16)
    summaries = {kind: kind.reduce(keys, 3) for kind in QuestPolicy.summaries}
    scores = QuestPolicy().score(query, summaries, 9)
    products = torch.einsum("lhgd,lhctd->lhgct", query, keys)
    assert bool((scores[..., None] >= products - 1e-5).all())
    best = torch.stack([keys.amin(3), keys.amax(3)])
    wanted = (query[None, :, :, :, None] * best[:, :, :, None]).amax(0).sum(-1)
    torch.testing.assert_close(scores, wanted)
    alone = {kind: keys[:, :, :, 0] for kind in QuestPolicy.summaries}
    torch.testing.assert_close(QuestPolicy().score(query, alone, 9), products[..., 0])


# Scores of a wrong shape, from those of [..., KV heads, group, chunks].
WRONG_SHAPES = {
    "no axis of KV heads": lambda scores: scores[..., 0, :, :],
    "KV heads added up": lambda scores: scores.sum(-3, keepdim=True),
    "half of the group": lambda scores: scores[..., :2, :],
    "no axis of the group": lambda scores: scores.sum(-2),
    "one for all layers": lambda scores: scores.sum(-4, keepdim=True),
    "a chunk less": lambda scores: scores[..., 1:],
    "chunks before heads": lambda scores: scores.transpose(-1, -2),
}


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_scores_of_another_shape_are_refused(wrong):
    class Wrong(RetrievalPolicy):
        name = "wrong"

        def score(self, query, summaries, num_chunks):
            return WRONG_SHAPES[wrong](super().score(query, summaries, num_chunks))

    query, policy = torch.randn(3, 2, 4, 16), Wrong()
    summaries = {Summary.MEAN: torch.randn(3, 2, 13, 16)}
    with pytest.raises(ValueError) as refused:
        policy.checked_score(query, summaries, 13)
    found = list(policy.score(query, summaries, 13).shape)
    told = f"selection policy 'wrong': score() gave {found}; it has to be [3, 2, 4 (or 1), 13]"
    assert told in str(refused.value)


def retrieval_cache(
    policy="retrieval",
    num_blocks=64,
    block_size=BLOCK,
    budget=BUDGET,
) -> tuple[RetrievalCache, torch.Tensor]:
    """Return a cache over random keys, and these, [layers, num_blocks, heads, block_size, 16]."""
    keys = torch.randn(2, num_blocks, 2, block_size, 16, generator=torch.Generator().manual_seed(0))
    chosen = POLICIES[policy]()
    summaries = ChunkSummaries(
        chosen.summaries,
        2,
        num_blocks,
        2,
        16,
        torch.float32,
        [lambda ids, kind, layer=layer: kind.reduce(keys[layer, ids], 2) for layer in range(2)],
    )
    return RetrievalCache(summaries, chosen, block_size, budget), keys


def blocks_read(tables, skipped, cache, num_tokens, row=0, layer=0, head=0):
    """Return block ids that a one-head sequence reaches, in order."""
    heads = cache.summaries.num_kv_heads
    length = num_tokens - int(skipped[row])
    table = tables[layer, row * heads + head][: -(-length // BLOCK)]
    assert bool((table % heads == head).all())
    return (table // heads).tolist()


def test_table_is_first_selected_then_tail():
    cache, keys = retrieval_cache()
    blocks = np.random.default_rng(0).permutation(64).astype(np.int32)
    num_tokens = 40 * BLOCK + 5
    query = torch.randn(2, 1, 2, 16)
    selection = cache.selection("a", blocks, num_tokens)
    tables, skipped = cache.block_table([selection], [blocks], [num_tokens + 6])
    in_pass = PassSelection(cache.policy, {0: selection.candidates}, 2)
    assert in_pass.begin_pass([0], [1], [0], tables.unflatten(1, (1, 2)))
    for layer in range(2):
        in_pass.select(layer, query[layer])
    for layer in range(2):
        for head in range(2):
            read = blocks_read(tables, skipped, cache, num_tokens + 6, 0, layer, head)
            assert len(set(read)) == len(read)
            assert read[0] == blocks[0]
            # Recent blocks and the one being written, in their order, at the end.
            assert read[-3:] == blocks[38:41].tolist()
            candidates = blocks[1:38]
            mean = keys[layer, candidates, head].mean(1)
            best = (mean @ query[layer, 0, head]).topk(5).indices
            assert set(read[1:-3]) == set(candidates[best.numpy()].tolist())
            assert len(read) * BLOCK <= 8 * BLOCK + BLOCK


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 70, 8 * 32, 8 * 32 + 31])
def test_budget_that_covers_the_context_reads_everything_in_order(num_tokens):
    cache, _ = retrieval_cache()
    blocks = np.arange(20, 50, dtype=np.int32)
    selection = cache.selection("a", blocks, num_tokens)
    tables, skipped = cache.block_table([selection], [blocks], [num_tokens])
    assert int(skipped[0]) == 0
    wanted = blocks[: -(-num_tokens // BLOCK)].tolist()
    assert blocks_read(tables, skipped, cache, num_tokens) == wanted


def test_known_blocks_bring_their_means_along():
    """Requests share the blocks of a cached prefix."""
    cache, _ = retrieval_cache()
    updated = []
    update = cache.summaries.update
    cache.summaries.update = lambda ids: (updated.append(ids.tolist()), update(ids))
    blocks = np.arange(64, dtype=np.int32)
    cache.selection("a", blocks, 40 * BLOCK)
    cache.release("a")
    cache.selection("b", blocks, 42 * BLOCK)
    cache.invalidate_summaries([3, 7])
    cache.selection("c", blocks, 42 * BLOCK)
    assert updated == [list(range(40)), [40, 41], [3, 7]]


@pytest.mark.parametrize("order", ["plain", "transposed", "pairs", "shuffled"])
@pytest.mark.parametrize("head_dim", [16, 80, 320])
def test_key_layout_is_found_by_probing(order, head_dim):
    generator = torch.Generator().manual_seed(0)
    size = BLOCK * head_dim
    places = torch.arange(size)
    if order == "transposed":
        places = places.view(BLOCK, head_dim).T.flatten()
    elif order == "pairs":  # as matrix units want it: two dimensions of a token side by side
        places = places.view(BLOCK, head_dim // 2, 2).transpose(0, 1).flatten()
    elif order == "shuffled":
        places = torch.randperm(size, generator=generator)

    def write_block(keys):
        return keys.flatten()[places]

    for dtype in (torch.float32, torch.bfloat16):
        found_order = probe_key_order(write_block, BLOCK, head_dim, dtype)
        keys = torch.randn(BLOCK, 1, head_dim, generator=generator)
        wanted = {Summary.MEAN: keys.mean(0), Summary.MIN: keys.amin(0), Summary.MAX: keys.amax(0)}
        for kind in Summary:
            found = kind.reduce(write_block(keys)[found_order], -1)
            torch.testing.assert_close(found, wanted[kind][0], atol=1e-5, rtol=1e-5)


def test_layout_that_cannot_be_read_is_refused():
    with pytest.raises(RuntimeError, match="cannot read"):
        probe_key_order(lambda keys: torch.zeros_like(keys), BLOCK, 64, torch.float32)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_both_runners_select_alike(policy, group):
    """Compare rows of unlike lengths over scattered blocks; the last one reads all of its own."""
    layers, heads, num_blocks, dim, query_len = 2, 3, 70, 16, 2
    counts, num_selected, width = [60, 9, 25, 5], [6, 6, 8, 5], 12
    keys = torch.randn(layers, num_blocks, heads, BLOCK, dim)
    kept = {}
    for kind in policy.summaries:
        kept[kind] = QuantizedSummaries.allocate((layers, heads, num_blocks, dim), CPU)
        for layer, vectors in enumerate(kind.reduce(keys, 3).transpose(1, 2)):
            kept[kind].write(layer, torch.arange(num_blocks), vectors)
    tables = torch.stack([torch.randperm(num_blocks)[:64] for _ in counts]).to(torch.int32)
    rows = some_rows(4, gamma=1, tail=counts, num_selected=num_selected, room=[6] * 4)
    found = torch.zeros(layers, rows.max_rows * heads, width, dtype=torch.int32)
    block_tables = torch.cat([tables, tables.new_zeros(rows.max_rows - 4, 64)])
    shapes = heads * group, query_len, (heads, 1), 9
    selection = PolicySelection(policy(), kept, rows, block_tables, found, *shapes)
    query = torch.randn(layers, 4 * query_len, heads * group, dim)
    candidates = {}
    for row, (table, count, selected) in enumerate(zip(tables, counts, num_selected)):
        if selected < count:
            ids = table[1:count].long()
            summaries = {
                kind: torch.stack([of_kind.dequantize(layer, ids) for layer in range(layers)])
                for kind, of_kind in kept.items()
            }
            candidates[row] = Candidates(selected - 1, ids, summaries)
    expected = torch.zeros(layers, 4, heads, width, dtype=torch.int32)
    alone = PassSelection(policy(), candidates, heads)
    assert alone.begin_pass([0, 1, 2, 3], [query_len] * 4, [0] * 4, expected)
    for layer in range(layers):
        selection.select(layer, query[layer])
        alone.select(layer, query[layer])
    found = found.unflatten(1, (-1, heads))[:, :4]
    assert torch.equal(found[:, 3], torch.zeros_like(found[:, 3]))
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert (found != 0).sum() > 40
