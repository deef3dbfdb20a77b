"""Layout of the tables that hold the state of rows and slots on the device.

A *row* is a request in this proposal, a *slot* its place in TriForce's buffers that last from
proposal to proposal, a *state* its place in the model runner's tensors. The host names columns and
values by the enums, kernels by the constants of the same names.

The row table is int32, [NUM_ROW_COLUMNS, max_rows]. The values of a column are contiguous, so that
a column is a tensor without a copy. The host fills the columns of ``RowColumn``, kernels those of
``StateColumn``.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from vllm.triton_utils import tl, triton


class RowColumn(IntEnum):
    """Columns of the row table that the host fills."""

    BATCH_ROW = 0  # the row's place in the runner's batch
    STATE = 1  # its place in the runner's tensors
    SLOT = 2  # its place in buffers that last from proposal to proposal
    REFRESH = 3  # a Refresh
    RESERVED = 4  # tokens that its allocated blocks hold
    LIMIT = 5  # length at which the request ends
    WINDOW_START = 6  # index of the first recent token in level 1's window
    MAX_TOKENS = 7  # limit of the proposal's length
    MAX_ROUNDS = 8  # limit of the rounds in which it takes part
    ONE_HOT = 9  # not 0: its proposal is exported with one-hot distributions


class StateColumn(IntEnum):
    """Columns of the row table that kernels fill."""

    COMPUTED = 10  # tokens with KV, when the proposal began
    LAST_TOKEN = 11  # the newest token of the full pass
    LENGTH = 12  # tokens of the proposal so far
    ROOM = 13  # length that the proposal may reach
    ROUNDS_LEFT = 14  # that the row may still take part in
    TAIL = 15  # first block of the tail of level 2's cache
    NUM_SELECTED = 16  # blocks that level 2 reads before the tail
    SKIPPED = 17  # tokens before the tail that level 2 does not read
    NUM_BLOCKS = 18  # allocated blocks
    FIRST_NEWLY_FULL = 19  # first block that became full since the last selection
    LAST_NEWLY_FULL = 20  # the end of these blocks, exclusive
    NUM_DRAFTED = 21  # tokens that level 1 drafted in this round
    NUM_ACCEPTED = 22  # of these, the tokens that level 2 accepted
    NUM_EMITTED = 23  # tokens that this round added to the proposal
    HAS_NAN = 24  # not 0: logits of this proposal had a NaN
    TOP_K = 25  # the vocabulary's size for none
    NUM_ROWS = 26  # rows in use, at row 0


class FloatColumn(IntEnum):
    """Columns of the rows' float32 table, [NUM_FLOAT_COLUMNS, max_rows]."""

    TEMPERATURE = 0  # 0 is greedy
    DIVISOR = 1  # the temperature, 1 where a row is greedy
    TOP_P = 2  # 1 for none
    MIN_P = 3  # 0 for none


class SlotColumn(IntEnum):
    """Columns of the slot table, int32, [num_slots, NUM_SLOT_COLUMNS]."""

    KEPT_TAIL = 0  # first block of the tail, when the selection was made
    KEPT_FULL = 1  # full blocks, when the selection was made
    DISABLED = 2  # not 0: logits had a NaN, and the owner is not speculated on any more


class OutcomeColumn(IntEnum):
    """Columns of the outcomes that the planner reads, int32, [max_rows, NUM_OUTCOMES]."""

    NUM_PROPOSED = 0  # tokens
    NUM_ROUNDS = 1  # of levels 1 and 2 in which the row took part
    LEVEL1_ACCEPTED = 2  # tokens
    LEVEL1_REJECTED = 3  # rounds in which level 2 rejected a token


class Refresh(IntEnum):
    """State of a row's selection: kept, due, or unused."""

    NOT_DUE = 0
    DUE = 1
    NEW_OWNER = 2  # due, and the slot's selection was another request's
    UNUSED = 3  # level 2 takes no part: no selection is read or made


BATCH_ROW = tl.constexpr(int(RowColumn.BATCH_ROW))
STATE = tl.constexpr(int(RowColumn.STATE))
SLOT = tl.constexpr(int(RowColumn.SLOT))
REFRESH = tl.constexpr(int(RowColumn.REFRESH))
RESERVED = tl.constexpr(int(RowColumn.RESERVED))
LIMIT = tl.constexpr(int(RowColumn.LIMIT))
WINDOW_START = tl.constexpr(int(RowColumn.WINDOW_START))
MAX_TOKENS = tl.constexpr(int(RowColumn.MAX_TOKENS))
MAX_ROUNDS = tl.constexpr(int(RowColumn.MAX_ROUNDS))
ONE_HOT = tl.constexpr(int(RowColumn.ONE_HOT))

COMPUTED = tl.constexpr(int(StateColumn.COMPUTED))
LAST_TOKEN = tl.constexpr(int(StateColumn.LAST_TOKEN))
LENGTH = tl.constexpr(int(StateColumn.LENGTH))
ROOM = tl.constexpr(int(StateColumn.ROOM))
ROUNDS_LEFT = tl.constexpr(int(StateColumn.ROUNDS_LEFT))
TAIL = tl.constexpr(int(StateColumn.TAIL))
NUM_SELECTED = tl.constexpr(int(StateColumn.NUM_SELECTED))
SKIPPED = tl.constexpr(int(StateColumn.SKIPPED))
NUM_BLOCKS = tl.constexpr(int(StateColumn.NUM_BLOCKS))
FIRST_NEWLY_FULL = tl.constexpr(int(StateColumn.FIRST_NEWLY_FULL))
LAST_NEWLY_FULL = tl.constexpr(int(StateColumn.LAST_NEWLY_FULL))
NUM_DRAFTED = tl.constexpr(int(StateColumn.NUM_DRAFTED))
NUM_ACCEPTED = tl.constexpr(int(StateColumn.NUM_ACCEPTED))
NUM_EMITTED = tl.constexpr(int(StateColumn.NUM_EMITTED))
HAS_NAN = tl.constexpr(int(StateColumn.HAS_NAN))
TOP_K = tl.constexpr(int(StateColumn.TOP_K))
NUM_ROWS = tl.constexpr(int(StateColumn.NUM_ROWS))
NUM_ROW_COLUMNS = len(RowColumn) + len(StateColumn)

TEMPERATURE = tl.constexpr(int(FloatColumn.TEMPERATURE))
DIVISOR = tl.constexpr(int(FloatColumn.DIVISOR))
TOP_P = tl.constexpr(int(FloatColumn.TOP_P))
MIN_P = tl.constexpr(int(FloatColumn.MIN_P))

KEPT_TAIL = tl.constexpr(int(SlotColumn.KEPT_TAIL))
KEPT_FULL = tl.constexpr(int(SlotColumn.KEPT_FULL))
DISABLED = tl.constexpr(int(SlotColumn.DISABLED))
NUM_SLOT_COLUMNS = tl.constexpr(len(SlotColumn))

NUM_PROPOSED = tl.constexpr(int(OutcomeColumn.NUM_PROPOSED))
NUM_ROUNDS = tl.constexpr(int(OutcomeColumn.NUM_ROUNDS))
LEVEL1_ACCEPTED = tl.constexpr(int(OutcomeColumn.LEVEL1_ACCEPTED))
LEVEL1_REJECTED = tl.constexpr(int(OutcomeColumn.LEVEL1_REJECTED))
NUM_OUTCOMES = tl.constexpr(len(OutcomeColumn))

NOT_DUE = tl.constexpr(int(Refresh.NOT_DUE))
DUE = tl.constexpr(int(Refresh.DUE))
NEW_OWNER = tl.constexpr(int(Refresh.NEW_OWNER))
UNUSED = tl.constexpr(int(Refresh.UNUSED))


@triton.jit
def row_value(
    table_ptr,  # [number of columns, max_rows], of either dtype
    max_rows,
    row,
    column: tl.constexpr,
):
    """Load a row's value in one column."""
    return tl.load(table_ptr + column * max_rows + row)


@triton.jit
def set_row_value(table_ptr, max_rows, row, column: tl.constexpr, value):
    """Store a row's value in one column."""
    tl.store(table_ptr + column * max_rows + row, value)


@triton.jit
def num_rows_in_use(table_ptr, max_rows):
    """Load the number of rows in use; a CUDA graph may have been captured for more."""
    return tl.load(table_ptr + NUM_ROWS * max_rows)


@triton.jit
def disable_slot(table_ptr, max_rows, row, slots_ptr):
    """Mark a row's request: it is not speculated on any more."""
    slot = row_value(table_ptr, max_rows, row, SLOT)
    tl.store(slots_ptr + slot * NUM_SLOT_COLUMNS + DISABLED, 1)


def stack_columns(
    columns: Mapping[RowColumn, np.ndarray | Sequence[int]],  # each [num_rows]
) -> np.ndarray:  # [num_rows, len(RowColumn)], int32
    """Stack the host's columns in the table's order; a missing one is an error."""
    return np.stack([columns[column] for column in RowColumn], axis=1).astype(np.int32)
