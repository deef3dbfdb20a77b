"""Level 2's retrieval cache of the layers that lie in host memory: copies on the device."""

import torch

from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.refill_pool import PoolRefill
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows


class RetrievalPool:
    """For each slot ``width`` blocks a layer: each KV head has its own chunks in them, and behind
    the selected ones all have the recent blocks and room for what grows. Where a one-head block
    lies never changes, so that tables depend on the slot alone.

    Args:
        hosts: of each layer in host memory, its KV cache, [num_blocks, num_kv_heads, block_size,
            size].
        pools: [num_slots * width, num_kv_heads, block_size, size], laid out alike.
        first_layer: of those, among the layers that retrieve.
        head_strides: how tables name one head's block (``cache/one_head_blocks.py``).
        max_selected: blocks of a head, for a row.
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
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.width = width
        self.num_layers = len(pools)
        self._rows = rows
        self.refill = PoolRefill(
            hosts,
            pools,
            first_layer,
            num_slots,
            rows.max_rows,
            head_strides,
            max_selected,
            counters,
        )
        _, heads, block_size, _ = pools[0].shape
        per_block, per_head = head_strides
        blocks = torch.arange(num_slots * width, dtype=torch.int32, device=device)
        of_head = torch.arange(heads, dtype=torch.int32, device=device) * per_head
        self._of_slots = blocks.view(num_slots, 1, width) * per_block + of_head[:, None]
        self.tables = torch.zeros(rows.max_rows * heads, width, dtype=torch.int32, device=device)
        """[max_rows * num_kv_heads, width], one-head blocks of each row's slot, in any layer."""
        self.slot_mapping = torch.full(
            (rows.max_rows * (rows.gamma + 1),), -1, dtype=torch.int64, device=device
        )
        """Where level 2's tokens go, as ``PassInputs`` has it for the KV cache."""
        self._block_tables = blocks.view(num_slots, width)
        self._cleaner = NanScrubber(pools, block_size, device)

    def begin(self, tables: torch.Tensor) -> None:
        """A proposal begins.

        Args:
            tables: [num_layers, max_rows * num_kv_heads, width], int32, what its rows read.
        """
        rows = self._rows
        self.refill(rows, tables)
        own = self.tables.view(rows.max_rows, *self._of_slots.shape[1:])[: rows.num_rows]
        torch.index_select(self._of_slots, 0, rows.column(RowColumn.SLOT), out=own)

    def clean(self) -> None:
        """Removes NaN of the rows that have a fault: their slots will have other owners."""
        rows = self._rows
        tables = self._block_tables[rows.column(RowColumn.SLOT).long()]
        self._cleaner(rows, tables, None)
