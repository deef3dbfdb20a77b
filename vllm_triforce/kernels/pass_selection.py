"""Selection inside level 2's passes, as ``cache/pass_selection.py`` does it, in launches of a fixed
shape. In passes that do not select they return at once.

A layer takes two launches. The first scores each query and tile of chunks; the second adds up each
chunk's votes and finds the chunks with the most. The first also copies the queries head by head, as
attention over one-head sequences needs them.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.cache.summaries import TILE, QuantizedSummaries
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.retrieval import one_head_block
from vllm_triforce.kernels.rows import Rows

_TOKENS = tl.constexpr(TOKENS_PER_SELECTION)
_CHUNKS = tl.constexpr(TILE)  # of a program
_VOTES, _SELECT_WARPS = 4096, 8  # of a step of the selection, and its warps
_SCORES = 16_384  # of a step that adds up votes: more do not fit the registers
# Digits of a vote's bits, from the highest: votes that differ by less than 2 ** -16 of themselves
# count as equal.
_DIGITS, _DIGIT_BITS, _RADIX = tl.constexpr(3), tl.constexpr(8), tl.constexpr(256)
_LAST_SHIFT = tl.constexpr(7)


class PassSelectionV2:
    """Selects each layer's chunks by mean keys, with the query of each row's newest token.

    Args:
        means: mean keys of all layers.
        rows: of the proposal. A row whose context is larger than the budget has chunks before its
            tail that are not selected; of any other row level 2 reads all.
        block_tables: [max_rows, width], int32, of the retrieving group.
        sparse_tables: [num_layers, max_rows * num_kv_heads, width], int32, whose blocks from the
            second to the last selected one are written.
        num_heads: query heads.
        query_len: tokens of each row in a pass; the first, the newest settled one, votes.
        chunk_ids: of the tables.
    """

    def __init__(
        self,
        means: QuantizedSummaries,
        rows: Rows,
        block_tables: torch.Tensor,
        sparse_tables: torch.Tensor,
        num_heads: int,
        query_len: int,
        chunk_ids: ChunkIds,
    ) -> None:
        self._means, self._rows = means, rows
        self._block_tables, self._sparse_tables = block_tables, sparse_tables
        _, self._num_kv_heads, _, self._head_dim = means.values.shape
        self._query_len = query_len
        self._chunk_ids = chunk_ids
        self._group = num_heads // self._num_kv_heads
        self._num_tiles = triton.cdiv(block_tables.shape[1], TILE)
        shape = (rows.max_rows, self._num_kv_heads, self._group, self._num_tiles)
        device = block_tables.device
        self._sums = torch.zeros(*shape, 2, dtype=torch.float32, device=device)
        """Greatest score, and sum of the exponentials, of each query and tile."""
        self._scores = torch.zeros(*shape, TILE, dtype=torch.float32, device=device)
        max_chunks = self._num_tiles * TILE
        self._votes = torch.zeros(
            rows.max_rows, self._num_kv_heads, max_chunks, dtype=torch.float32, device=device
        )

    @property
    def num_bytes(self) -> int:
        return self._sums.nbytes + self._scores.nbytes + self._votes.nbytes

    def select(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows * query_len, num_heads, head_dim]
    ) -> torch.Tensor:
        """Write the selected blocks of a layer into its block tables.

        Returns:
            The queries by KV head, [num_rows * num_kv_heads * query_len, group, head_dim].
        """
        num_rows, group = len(query) // self._query_len, self._group
        values, scales = self._means.values[layer], self._means.scales[layer]
        if query.stride(1) != self._head_dim or query.stride(2) != 1:
            query = query.contiguous()
        by_head = query.new_empty(len(query) * self._num_kv_heads, group, self._head_dim)
        grid = (num_rows, self._num_kv_heads, self._num_tiles)
        _scores_kernel[grid](
            query,
            query.stride(0),
            by_head,
            values,
            scales,
            scales.stride(0),
            self._block_tables,
            self._block_tables.stride(0),
            self._rows.table,
            self._sums,
            self._scores,
            NUM_TILES=self._num_tiles,
            QUERY_LEN=self._query_len,
            GROUP=group,
            PADDED_GROUP=max(16, triton.next_power_of_2(group)),
            HEAD_DIM=self._head_dim,
            PADDED_DIM=max(16, triton.next_power_of_2(self._head_dim)),
        )
        table, max_chunks = self._sparse_tables[layer], self._votes.shape[2]
        padded_group = triton.next_power_of_2(group)
        num_votes = min(_VOTES, triton.next_power_of_2(max_chunks))
        _select_chunks_kernel[grid[:2]](
            self._sums,
            self._scores,
            self._votes,
            max_chunks,
            self._block_tables,
            self._block_tables.stride(0),
            self._rows.table,
            table,
            table.stride(0),
            IDS=tuple(self._chunk_ids),
            NUM_TILES=self._num_tiles,
            PADDED_TILES=triton.next_power_of_2(self._num_tiles),
            GROUP=group,
            PADDED_GROUP=padded_group,
            SCORED=min(_SCORES // padded_group, num_votes),
            VOTES=num_votes,
            num_warps=_SELECT_WARPS,
        )
        return by_head


@triton.jit
def _num_candidates(row_ptr):
    """Return the chunks before a row's tail; 0 if level 2 reads all, or if no selection is due."""
    tail = tl.load(row_ptr + col.TAIL)
    length = tl.load(row_ptr + col.LENGTH)
    length_before = length - tl.load(row_ptr + col.NUM_EMITTED)
    is_due = (length == 0) | (length // _TOKENS > length_before // _TOKENS)
    is_due &= length < tl.load(row_ptr + col.ROOM)
    return tl.where(is_due & (tl.load(row_ptr + col.NUM_SELECTED) < tail), tail, 0)


@triton.jit
def _scores_kernel(
    query_ptr,  # [num_rows * QUERY_LEN, num_heads, HEAD_DIM], heads contiguous
    token_stride,
    by_head_ptr,  # [num_rows, num_kv_heads, QUERY_LEN, GROUP, HEAD_DIM], written
    values_ptr,  # [num_kv_heads, num_blocks, HEAD_DIM], int8
    scales_ptr,  # [num_kv_heads, num_blocks]
    scales_head_stride,
    block_tables_ptr,  # [max_rows, width]
    block_table_stride,
    table_ptr,
    sums_ptr,  # [max_rows, num_kv_heads, GROUP, NUM_TILES, 2], written
    scores_ptr,  # [max_rows, num_kv_heads, GROUP, NUM_TILES * _CHUNKS], written
    NUM_TILES: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Score a tile of chunks, and write its part of each query's softmax."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    heads_before = row * tl.num_programs(1) + head
    row_ptr = table_ptr + row * col.ROW_STRIDE
    dims = tl.arange(0, PADDED_DIM)
    queries = tl.arange(0, PADDED_GROUP)
    has_vote = queries < GROUP
    query_mask = has_vote[:, None] & (dims[None, :] < HEAD_DIM)
    query_ptr += row * QUERY_LEN * token_stride + head * GROUP * HEAD_DIM
    query_ptrs = query_ptr + queries[:, None] * HEAD_DIM + dims[None, :]
    if tile == 0:
        copy_ptrs = by_head_ptr + heads_before * QUERY_LEN * GROUP * HEAD_DIM
        copy_ptrs += queries[:, None] * HEAD_DIM + dims[None, :]
        for token in tl.static_range(QUERY_LEN):
            copied = tl.load(query_ptrs + token * token_stride, mask=query_mask)
            tl.store(copy_ptrs + token * GROUP * HEAD_DIM, copied, mask=query_mask)
    num_chunks = _num_candidates(row_ptr)
    if tile * _CHUNKS >= num_chunks:
        return
    chunks = tile * _CHUNKS + tl.arange(0, _CHUNKS)
    # The first chunk is always read.
    is_candidate = (chunks > 0) & (chunks < num_chunks)
    table = block_tables_ptr + row * block_table_stride
    blocks = tl.load(table + chunks, mask=is_candidate, other=0).to(tl.int64)
    places = head * scales_head_stride + blocks
    mean_mask = is_candidate[None, :] & (dims[:, None] < HEAD_DIM)
    mean_ptrs = values_ptr + places[None, :] * HEAD_DIM + dims[:, None]
    means = tl.load(mean_ptrs, mask=mean_mask, other=0)
    query = tl.load(query_ptrs, mask=query_mask, other=0.0)
    # int8 numbers are exact in float16. A query beyond its range has no vote.
    dtype: tl.constexpr = tl.float32 if query.dtype == tl.float32 else tl.float16
    scores = tl.dot(query.to(dtype), means.to(dtype), input_precision="ieee")
    scales = tl.load(scales_ptr + places, mask=is_candidate, other=0.0)
    scores = scores * (scales * HEAD_DIM**-0.5)[None, :]
    scores = tl.where(is_candidate[None, :], scores, float("-inf"))

    top = tl.max(scores, axis=1)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.exp(scores - shift[:, None]), axis=1)
    first_tiles = (heads_before * GROUP + queries) * NUM_TILES
    tl.store(sums_ptr + (first_tiles + tile) * 2, top, mask=has_vote)
    tl.store(sums_ptr + (first_tiles + tile) * 2 + 1, total, mask=has_vote)
    score_ptrs = scores_ptr + first_tiles[:, None] * _CHUNKS + chunks[None, :]
    tl.store(score_ptrs, scores, mask=has_vote[:, None])


@triton.jit
def _select_chunks_kernel(
    sums_ptr,  # [max_rows, num_kv_heads, GROUP, NUM_TILES, 2]
    scores_ptr,  # [max_rows, num_kv_heads, GROUP, NUM_TILES * _CHUNKS]
    votes_ptr,  # [max_rows, num_kv_heads, max_chunks], written
    max_chunks,
    block_tables_ptr,  # [max_rows, width]
    block_table_stride,
    table_ptr,
    sparse_ptr,  # [max_rows * num_kv_heads, sparse_width], written
    sparse_stride,
    IDS: tl.constexpr,  # ChunkIds
    NUM_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SCORED: tl.constexpr,  # chunks of a step that adds up their votes
    VOTES: tl.constexpr,  # of a later step
):
    """Find the least vote that is selected, digit by digit (radix select), and write the blocks."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    num_chunks = _num_candidates(row_ptr)
    if num_chunks == 0:
        return
    wanted = tl.load(row_ptr + col.NUM_SELECTED) - 1
    heads_before = row * num_kv_heads + head
    queries = tl.arange(0, PADDED_GROUP)
    first_tiles = (heads_before * GROUP + queries)[:, None] * NUM_TILES
    tiles = tl.arange(0, PADDED_TILES)
    sum_ptrs = sums_ptr + (first_tiles + tiles[None, :]) * 2
    is_sum = (queries < GROUP)[:, None] & (tiles * _CHUNKS < num_chunks)[None, :]
    tops = tl.load(sum_ptrs, mask=is_sum, other=float("-inf"))
    totals = tl.load(sum_ptrs + 1, mask=is_sum, other=0.0)
    top = tl.max(tops, axis=1)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(totals * tl.exp(tops - top[:, None]), axis=1)
    total = tl.where(total > 0, total, 1.0)
    votes_ptr += heads_before * max_chunks
    for start in range(0, num_chunks, SCORED):
        chunks = start + tl.arange(0, SCORED)
        is_score = (queries < GROUP)[:, None] & (chunks < num_chunks)[None, :]
        score_ptrs = scores_ptr + first_tiles * _CHUNKS + chunks[None, :]
        scores = tl.load(score_ptrs, mask=is_score, other=float("-inf"))
        votes = tl.sum(tl.exp(scores - top[:, None]) / total[:, None], axis=0)
        # A NaN ranks last: output stays right with any selection.
        tl.store(votes_ptr + chunks, tl.where(votes >= 0, votes, 0.0), mask=chunks < num_chunks)
    tl.debug_barrier()  # the votes below are read by other threads
    out = sparse_ptr + heads_before * sparse_stride + 1
    table = block_tables_ptr + row * block_table_stride
    # As integers, floats of at least 0 have the same order.
    least, num_above = 0, 0  # the least vote's digits so far; votes whose digits are greater
    digits = tl.arange(0, _RADIX)
    for digit in tl.static_range(_DIGITS):
        shift = _LAST_SHIFT + (_DIGITS - 1 - digit) * _DIGIT_BITS
        counts = tl.zeros([_RADIX], dtype=tl.int32)
        for start in range(0, num_chunks, VOTES):
            chunks = start + tl.arange(0, VOTES)
            is_candidate = (chunks > 0) & (chunks < num_chunks)
            votes = tl.load(votes_ptr + chunks, mask=is_candidate, other=0.0)
            bits = votes.to(tl.int32, bitcast=True) >> shift
            is_counted = is_candidate & ((bits >> _DIGIT_BITS) == least)
            counts += tl.histogram(bits & (_RADIX - 1), _RADIX, is_counted)
        up_to = tl.cumsum(counts, axis=0)
        num_at_least = num_above + tl.sum(counts, axis=0) - up_to + counts
        last = tl.sum((num_at_least >= wanted).to(tl.int32), axis=0) - 1
        num_above += tl.sum(tl.where(digits > last, counts, 0), axis=0)
        least = least * _RADIX + last
    # Votes above the threshold come first, then equal ones while there is room.
    next_above, next_equal = 0, num_above
    for start in range(0, num_chunks, VOTES):
        chunks = start + tl.arange(0, VOTES)
        is_candidate = (chunks > 0) & (chunks < num_chunks)
        votes = tl.load(votes_ptr + chunks, mask=is_candidate, other=0.0)
        bits = votes.to(tl.int32, bitcast=True) >> _LAST_SHIFT
        is_above = is_candidate & (bits > least)
        is_equal = is_candidate & (bits == least)
        # One scan counts both: VOTES is less than 2 ** 15.
        ranks = tl.cumsum((is_above.to(tl.int32) << 16) + is_equal.to(tl.int32), axis=0)
        places = tl.where(is_above, next_above + (ranks >> 16), next_equal + (ranks & 0xFFFF)) - 1
        next_above += tl.sum(is_above.to(tl.int32), axis=0)
        next_equal += tl.sum(is_equal.to(tl.int32), axis=0)
        mask = (is_above | is_equal) & (places < wanted)
        ids = tl.load(table + chunks, mask=is_candidate, other=0)
        ids = one_head_block(ids, head.to(tl.int32), IDS)
        tl.store(out + places, ids, mask=mask)
