"""Selection inside level 2's passes equals the votes of each row's newest token, spelled out: the
drafts that level 2 tests have no vote."""

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import some_rows
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.summaries import QuantizedSummaries, num_vote_numbers
from vllm_triforce.kernels import pass_selection
from vllm_triforce.kernels.pass_selection import PassSelectionV2

LAYERS, BLOCKS, WIDTH = 2, 300, 9
# Chunks before the tail: more than a tile, one more than is selected, as many, none; then of rows
# whose proposal has tokens: not due, due, not due, due.
TAILS, NUM_SELECTED = [150, 6, 5, 0, 150, 150, 150, 150], [5, 5, 5, 0, 5, 5, 5, 5]
LENGTHS, NUM_EMITTED = [0, 0, 0, 0, 3, 5, 5, 4], [0, 0, 0, 0, 3, 2, 1, 1]
IDS = [ChunkIds(8, 1), ChunkIds(32, 12, 2, split=6)]


def votes_of(queries: torch.Tensor, means: torch.Tensor) -> torch.Tensor:  # [num_chunks]
    """Votes of queries [num_queries, head_dim] for means [num_chunks, head_dim]."""
    scores = queries.float() @ means.t() * queries.shape[-1] ** -0.5
    return scores.softmax(-1).sum(0)


@pytest.mark.parametrize("ids", IDS, ids=["blocks", "parts of blocks"])
@pytest.mark.parametrize(
    ("query_len", "group", "dim", "dtype", "votes"),
    [
        (1, 1, 64, torch.float32, 4096),
        (3, 4, 80, torch.float32, 64),  # several steps
        (5, 3, 64, torch.float32, 4096),
        (3, 8, 128, torch.bfloat16, 64),
    ],
)
def test_each_layer_writes_the_blocks_with_the_most_votes(
    query_len, group, dim, dtype, votes, ids, monkeypatch
):
    monkeypatch.setattr(pass_selection, "_VOTES", votes)
    monkeypatch.setattr(pass_selection, "_SCORES", 4 * votes)
    torch.manual_seed(0)
    kv_heads, num_rows = 2, len(TAILS)
    means = QuantizedSummaries.allocate((LAYERS, kv_heads, BLOCKS, dim), DEVICE)
    for layer in range(LAYERS):
        vectors = torch.randn(kv_heads, BLOCKS, dim, device=DEVICE)
        means.write(layer, torch.arange(BLOCKS, device=DEVICE), vectors)
    num_drafted = [query_len - 1] * num_rows
    rows = some_rows(
        num_rows,
        gamma=query_len,
        tail=TAILS,
        num_selected=NUM_SELECTED,
        num_drafted=num_drafted,
        length=LENGTHS,
        num_emitted=NUM_EMITTED,
        room=[6] * num_rows,
    )
    # The last row is not in use.
    tables = torch.stack([torch.randperm(BLOCKS)[:155] for _ in range(rows.max_rows)])
    shape = (LAYERS, rows.max_rows * kv_heads, WIDTH)
    sparse_tables = torch.full(shape, -1, dtype=torch.int32, device=DEVICE)
    block_tables = tables.to(torch.int32).to(DEVICE)
    selection = PassSelectionV2(
        means, rows, block_tables, sparse_tables, kv_heads * group, query_len, ids
    )
    numbers = num_vote_numbers(block_tables.shape[1], kv_heads * group, kv_heads)
    assert selection.num_bytes == 4 * rows.max_rows * numbers
    for _ in range(2):  # buffers are used again
        for layer in range(LAYERS):
            # As in vLLM, keys and values lie behind each token's queries.
            shape = (num_rows * query_len, kv_heads * (group + 2), dim)
            query = torch.randn(shape, device=DEVICE).to(dtype)[:, : kv_heads * group]
            copied = selection.select(layer, query)
            by_head = query.unflatten(1, (kv_heads, group)).unflatten(0, (-1, query_len))
            assert torch.equal(copied, by_head.transpose(1, 2).flatten(0, 2))
            by_row = query.cpu().reshape(num_rows, query_len, kv_heads, group, dim)
            for row, (tail, num_selected) in enumerate(zip(TAILS, NUM_SELECTED)):
                for head in range(kv_heads):
                    own = sparse_tables[layer, row * kv_heads + head].cpu()
                    if tail <= num_selected or row in (4, 6):
                        assert (own == -1).all(), "it reads all of its context, or is not due"
                        continue
                    candidates = tables[row, 1:tail]
                    queries = by_row[row, 0, head]
                    keys = means.dequantize(layer, candidates.to(DEVICE))[head].cpu()
                    votes = votes_of(queries, keys)
                    named = ids.of(candidates, torch.tensor(head)).tolist()
                    chosen = [named.index(block) for block in own[1:num_selected].tolist()]
                    assert len(set(chosen)) == num_selected - 1
                    left_out = votes.clone()
                    left_out[chosen] = -1
                    assert votes[chosen].min() >= left_out.max() * (1 - 2e-3)
                    assert own[0] == -1 and (own[num_selected:] == -1).all()
    assert (sparse_tables[:, num_rows * kv_heads :] == -1).all()


def test_equal_votes_and_nan_select_as_many_blocks_as_there_is_room_for():
    kv_heads, dim = 1, 64
    means = QuantizedSummaries.allocate((1, kv_heads, BLOCKS, dim), DEVICE)
    rows = some_rows(2, gamma=1, tail=[100, 100], num_selected=[5, 5], room=[6, 6])
    tables = torch.arange(BLOCKS, dtype=torch.int32, device=DEVICE).expand(3, -1).contiguous()
    sparse = torch.full((1, 3, WIDTH), -1, dtype=torch.int32, device=DEVICE)
    selection = PassSelectionV2(means, rows, tables, sparse, 2, 1, ChunkIds(1, 0))
    query = torch.ones(2, 2, dim, device=DEVICE)
    query[1] = torch.nan
    selection.select(0, query)
    assert sparse[0, :2, 1:5].tolist() == [[1, 2, 3, 4]] * 2
