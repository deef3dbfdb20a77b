"""Promise: every policy selects what it says, alike on both runners.

The matrix runs each policy in ``POLICIES`` over odd sizes; a policy added there is tested here.
"""

import pytest
import torch

from tests.kernels.tensors import some_rows
from vllm_triforce.attention.cpu import probe_key_order
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.pass_selection import PassSelection
from vllm_triforce.cache.retrieval_cache import Selection
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.runner_v2.selections import PolicySelection
from vllm_triforce.selection import POLICIES, Summary
from vllm_triforce.selection.quest import QuestPolicy
from vllm_triforce.selection.retrieval import RetrievalPolicy

BLOCK = 32
CPU = torch.device("cpu")


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
        policy.best_chunks(query, summaries, 13, 5)
    found = list(policy.score(query, summaries, 13).shape)
    told = f"selection policy 'wrong': score() gave {found}; it has to be [3, 2, 4 (or 1), 13]"
    assert told in str(refused.value)


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
    shapes = heads * group, query_len, ChunkIds(heads, 1), 9
    selection = PolicySelection(policy(), kept, rows, block_tables, found, *shapes)
    query = torch.randn(layers, 4 * query_len, heads * group, dim)
    selections = []
    for table, count, selected in zip(tables, counts, num_selected):
        one = Selection(selected, count, table.numpy())
        if selected < count:
            ids = torch.from_numpy(one.candidates).long()
            one.summaries = {
                kind: torch.stack([of_kind.dequantize(layer, ids) for layer in range(layers)])
                for kind, of_kind in kept.items()
            }
        selections.append(one)
    expected = torch.zeros(layers, 4, heads, width, dtype=torch.int32)
    alone = PassSelection(policy(), selections, heads)
    assert alone.begin_pass([0, 1, 2, 3], [query_len] * 4, [0] * 4, expected)
    for layer in range(layers):
        selection.select(layer, query[layer])
        alone.select(layer, query[layer])
    found = found.unflatten(1, (-1, heads))[:, :4]
    assert torch.equal(found[:, 3], torch.zeros_like(found[:, 3]))
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert (found != 0).sum() > 40
