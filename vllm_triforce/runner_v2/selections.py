"""Retrieval cache on the device: the blocks that level 2 reads for each row (paper, section 4.2).

Policies and layout are those of ``cache/retrieval_cache.py``: the first chunk, the selected chunks,
then every block from the recent ones to the one being written. Each layer selects inside level 2's
passes (``cache/pass_selection.py``).
"""

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.attention.base import RetrievalAttention
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.cache.summaries import QuantizedSummaries, rows_scored_together
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.kernels.pass_selection import PassSelectionV2
from vllm_triforce.kernels.retrieval import build_sparse_tables
from vllm_triforce.kernels.row_table import Owner
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, Slot
from vllm_triforce.selection import POLICIES, SelectionPolicy, Summary


class PolicySelection:
    """Selects each layer's chunks by a policy's ``score()``, for policies without kernels.

    It scores as many chunks as the longest context has, so that shapes are fixed and a CUDA graph
    can hold its operations. Arguments but these are those of ``PassSelectionV2``.

    Args:
        summaries: of all layers, by kind.
        max_selected: selected blocks of a row and KV head at most, the first one included.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        summaries: dict[Summary, QuantizedSummaries],
        rows: Rows,
        block_tables: torch.Tensor,
        sparse_tables: torch.Tensor,
        num_heads: int,
        query_len: int,
        chunk_ids: ChunkIds,
        max_selected: int,
    ) -> None:
        num_kv_heads, max_chunks = sparse_tables.shape[1] // rows.max_rows, block_tables.shape[1]
        numbers = sum(kept.values.shape[-1] for kept in summaries.values())
        self._rows_together, self.num_bytes = rows_scored_together(
            rows.max_rows, max_chunks, num_heads, num_kv_heads, numbers
        )
        """``num_bytes`` are temporary, but graphs keep them."""
        self._policy, self._summaries, self._rows = policy, summaries, rows
        self._block_tables = block_tables
        self._tables = sparse_tables.unflatten(1, (rows.max_rows, num_kv_heads))
        self._num_kv_heads, self._query_len = num_kv_heads, query_len
        self._chunk_ids = chunk_ids
        device = block_tables.device
        self._heads = torch.arange(num_kv_heads, device=device)[:, None]
        self._chunks = torch.arange(max_chunks, device=device)
        self._places = torch.arange(min(max_selected, max_chunks) - 1, device=device)

    def select(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows * query_len, num_heads, head_dim]
    ) -> None:
        """Write the selected blocks of a layer into its block tables."""
        newest = query.unflatten(0, (-1, self._query_len))[:, 0].float()
        for start in range(0, len(newest), self._rows_together):
            part = slice(start, min(start + self._rows_together, len(newest)))
            self._select_rows(layer, newest[part], part)

    def _select_rows(self, layer: int, query: torch.Tensor, part: slice) -> None:
        rows, blocks = self._rows, self._block_tables[part]
        tail, num_selected = rows.tail[part, None], rows.num_selected[part, None]
        length, room = rows.length[part, None], rows.room[part, None]
        length_before = length - rows.num_emitted[part, None]
        is_due = length // TOKENS_PER_SELECTION > length_before // TOKENS_PER_SELECTION
        is_due = ((length == 0) | is_due) & (length < room) & (num_selected < tail)
        # The first chunk is always read, and chunks from the tail on, which has drafts that the
        # pass tests.
        is_other = (self._chunks == 0) | (self._chunks >= tail)  # [num_rows, max_chunks]
        is_other = is_other[:, None]
        grouped = query.unflatten(1, (self._num_kv_heads, -1))
        summaries = {
            kind: kept.dequantize(layer, blocks.long()).transpose(0, 1)
            for kind, kept in self._summaries.items()
        }
        best = self._policy.best_chunks(
            grouped, summaries, len(self._chunks), len(self._places), is_other
        )
        ids = blocks[:, None].expand(-1, self._num_kv_heads, -1).gather(2, best)
        ids = self._chunk_ids.of(ids, self._heads)
        selected = self._tables[layer, part, :, 1 : 1 + len(self._places)]
        is_written = is_due & (self._places < num_selected - 1)
        selected.copy_(torch.where(is_written[:, None], ids, selected))


class SelectionsV2:
    """Summaries of all blocks, and level 2's block tables of a proposal's rows.

    Args:
        attention: sparse attention of the platform.
        num_chunks: of vLLM's pool of blocks.
        chunk_tables: [max_rows, width], int32, buffer of chunks in the place of the retrieving
            group's blocks; that group's buffer where a block is a chunk.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        attention: RetrievalAttention,
        num_chunks: int,
        rows: Rows,
        chunk_tables: torch.Tensor,
    ) -> None:
        self._attention, self._rows = attention, rows
        self._block_size = config.block_size
        self._max_growth = config.max_growth
        self.chunk_tables = chunk_tables
        self.width = config.table_width
        first, num_layers = attention.layers[0], len(attention.layers)
        heads, device = first.num_kv_heads, chunk_tables.device
        self.policy = POLICIES[config.policy]()
        # Head-major, so that the summaries of one head are contiguous.
        shape = (num_layers, heads, num_chunks, first.head_size)
        self.summaries = {
            kind: QuantizedSummaries.allocate(shape, device) for kind in self.policy.summaries
        }
        tables_shape = (num_layers, rows.max_rows * heads, self.width)
        self.tables = torch.zeros(tables_shape, dtype=torch.int32, device=device)
        """[num_layers, max_rows * num_kv_heads, width], one-head blocks that each row reads."""
        parts = rows, chunk_tables, self.tables, first.num_heads, config.gamma + 1
        self._chunk_ids = attention.chunk_ids()
        self.in_pass: PassSelectionV2 | PolicySelection
        """Selects inside level 2's passes."""
        if config.has_selection_kernels:
            self.in_pass = PassSelectionV2(self.summaries[Summary.MEAN], *parts, self._chunk_ids)
        else:
            max_selected = config.max_selected_blocks
            self.in_pass = PolicySelection(
                self.policy, self.summaries, *parts, self._chunk_ids, max_selected
            )

    def begin(
        self,
        batch: BatchV2,
        table: torch.Tensor,  # [num_rows, width], the retrieving group's tables of chunks
        slots: list[Slot],
        owners: list[Owner],
    ) -> None:
        """Summarize blocks that filled since level 2's last proposal, and lay out all tables."""
        max_tokens = batch.max_computed_tokens.tolist()
        # New requests separately: they summarize their whole context, others a block or two.
        for owner in (Owner.NEW_OWNER, Owner.SAME_OWNER) if self.summaries else ():
            indices = [row for row, of_row in enumerate(owners) if of_row == owner]
            if indices:
                most = max(self._max_newly_full(slots[i], max_tokens[i], owner) for i in indices)
                rows = async_tensor_h2d(indices, table.device)
                self._attention.update_summaries(
                    self.summaries,
                    table[rows],
                    self._rows.first_newly_full[rows],
                    self._rows.last_newly_full[rows],
                    most,
                )
        for slot, num_tokens in zip(slots, max_tokens):
            slot.summarized_tokens = num_tokens
        build_sparse_tables(self.tables, self._rows, table, self._chunk_ids)

    def _max_newly_full(self, slot: Slot, max_tokens: int, owner: Owner) -> int:
        """Bound the number of blocks that filled since level 2's last proposal.

        It follows from token counts: by other routes a request grows without level 2.
        """
        tokens_before = 0 if owner == Owner.NEW_OWNER else slot.summarized_tokens
        # tokens_before may be too large, by drafts that were rejected: hence max_growth.
        return (max_tokens - tokens_before + self._max_growth) // self._block_size + 2
