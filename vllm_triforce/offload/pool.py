"""Retrieval cache of the host layers: copies on the device of the blocks that level 2 reads."""

import torch

from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.refill_pool import PoolRefill
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows


class RetrievalPool:
    """Device copies, ``width`` blocks for each slot and host layer.

    Each KV head has its own selected chunks, then the recent blocks and room for new tokens. A
    slot's blocks never move, so block tables depend on the slot alone.

    Args:
        hosts: KV cache of each host layer, [num_blocks, num_kv_heads, block_size, size].
        pools: one for each host layer, [num_slots * width, num_kv_heads, block_size, size], in the
            same layout.
        first_layer: index of the first host layer among the layers that retrieve.
        width: blocks of a slot, selected ones and tail together.
        head_strides: one-head block ids a block and a head apart (``cache/one_head_blocks.py``).
        max_selected: selected blocks of a row and KV head.
        counters: [len(DeviceCounter)], int64, added to.
    """

    def __init__(
        self,
        hosts: list[torch.Tensor],
        pools: list[torch.Tensor],
        first_layer: int,
        width: int,
        head_strides: tuple[int, int],
        max_selected: int,
        counters: torch.Tensor,
        rows: Rows,
    ) -> None:
        num_slots, device = len(pools[0]) // width, pools[0].device
        self.width = width
        self.num_layers = len(pools)
        self._rows = rows
        self.refill = PoolRefill(
            hosts,
            pools,
            first_layer,
            num_slots,
            head_strides,
            max_selected,
            counters,
        )
        _, heads, block_size, _ = pools[0].shape
        per_block, per_head = head_strides
        blocks = torch.arange(num_slots * width, dtype=torch.int32, device=device)
        head_offsets = torch.arange(heads, dtype=torch.int32, device=device) * per_head
        # [num_slots, num_kv_heads, width]
        self._slot_tables = blocks.view(num_slots, 1, width) * per_block + head_offsets[:, None]
        self.tables = torch.zeros(rows.max_rows * heads, width, dtype=torch.int32, device=device)
        """[max_rows * num_kv_heads, width], one-head blocks of each row's slot, for any layer."""
        self.slot_mapping = torch.full(
            (rows.max_rows * (rows.gamma + 1),), -1, dtype=torch.int64, device=device
        )
        """[max_rows * (gamma + 1)], slots of level 2's tokens in the pool; -1 is padding."""
        self._block_tables = blocks.view(num_slots, width)
        self._scrubber = NanScrubber(pools, block_size, device)

    def begin(self, tables: torch.Tensor) -> None:
        """Copy newly selected and newly written blocks at the beginning of a proposal.

        Args:
            tables: [num_layers, max_rows * num_kv_heads, width], int32, one-head blocks of the KV
                cache that the rows read.
        """
        rows = self._rows
        self.refill(rows, tables)
        row_tables = self.tables.view(rows.max_rows, *self._slot_tables.shape[1:])
        torch.index_select(
            self._slot_tables, 0, rows.column(RowColumn.SLOT), out=row_tables[: rows.num_rows]
        )

    def clean(self) -> None:
        """Scrub NaN from flagged rows' blocks, before other requests get the slots."""
        rows = self._rows
        tables = self._block_tables[rows.column(RowColumn.SLOT).long()]
        self._scrubber(rows, tables, None)
