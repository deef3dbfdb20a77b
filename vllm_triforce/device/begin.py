"""The beginning of a proposal, by whichever route."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.device.batch import DeviceBatch, LogitShaping
from vllm_triforce.device.retrieval import DeviceRetrieval
from vllm_triforce.device.slots import Slot, Slots
from vllm_triforce.device.sources.source import DeviceSource
from vllm_triforce.kernels.export_proposal import HandedUp
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.row_metadata import Refresh, RowColumn, stack_columns
from vllm_triforce.kernels.rows import Rows


@dataclass
class LevelParts:
    """What lasts from proposal to proposal."""

    config: ResolvedConfig
    level1: DeviceSource | None
    """What drafts for level 2; None where level 2 proposes by itself."""
    level2: DeviceRetrieval
    rows: Rows
    slots: Slots
    handed_up: HandedUp
    counters: torch.Tensor  # [number of DeviceCounter], int64
    race: Race
    shaping: LogitShaping


def take_slots(parts: LevelParts, batch: DeviceBatch) -> list[Slot]:
    """Each row's slot; whoever has just got one has no fault."""
    new = [name for name in batch.request_ids if name not in parts.slots]
    slots = [parts.slots.take(request_id) for request_id in batch.request_ids]
    if new:
        taken = [parts.slots.take(name).index for name in new]
        faults = parts.rows.faults.slot
        faults.index_fill_(0, async_tensor_h2d(np.array(taken), device=faults.device), 0)
    return slots


def begin_rows(
    parts: LevelParts, batch: DeviceBatch, slots: list[Slot], refresh: list[Refresh]
) -> None:
    """Tells the device of the rows; it finds out how much each may propose."""
    rows, selections = parts.rows, parts.level2.selections
    row_metadata = stack_columns(
        {
            RowColumn.BATCH_ROW: batch.batch_rows,
            RowColumn.STATE: batch.states,
            RowColumn.SLOT: [slot.index for slot in slots],
            RowColumn.REFRESH: refresh,
            RowColumn.RESERVED: batch.reserved,
            RowColumn.LIMIT: np.minimum(batch.limits, np.iinfo(np.int32).max),
            RowColumn.WINDOW_START: [slot.window_start for slot in slots],
            RowColumn.MAX_TOKENS: batch.max_num_tokens,
            RowColumn.MAX_ROUNDS: batch.max_num_rounds,
            RowColumn.IS_CERTAIN: batch.is_certain,
        }
    )
    rows.begin(
        async_tensor_h2d(row_metadata, rows.row_metadata.device),
        batch.num_computed,
        batch.num_sampled,
        batch.last_sampled,
        batch.parameters,
        parts.config.min_context,
        selections.block_size,
        selections.recent_blocks,
        selections.max_selected,
        selections.width,
    )
    if batch.sampling.kind != "greedy":  # a graph shapes them all
        parts.shaping.begin()
