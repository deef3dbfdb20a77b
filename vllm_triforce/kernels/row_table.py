"""What the host says of each row of a proposal: a table with a line a row, and its columns.

The host names columns and values by the enums, kernels by the constants of the same names.

What comes of each row, for those who plan: a table with a line a row, and its columns.

The host names columns by the enum, kernels by the constants of the same names.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from vllm.triton_utils import tl, triton


class RowColumn(IntEnum):
    """Columns of the table."""

    BATCH_ROW = 0  # the row's place in the runner's batch
    STATE = 1  # its place in the runner's tensors
    SLOT = 2  # its place in what TriForce keeps between proposals
    REFRESH = 3  # a Refresh
    RESERVED = 4  # tokens that its allocated blocks hold
    LIMIT = 5  # length at which the request ends
    WINDOW_START = 6  # index of the first recent token in level 1's window
    MAX_TOKENS = 7  # of its proposal
    MAX_ROUNDS = 8  # in which it takes part
    ONE_HOT = 9  # not 0: its proposal is handed up as if each token were certain


class Refresh(IntEnum):
    """Whether a row's selection is made anew."""

    NOT_DUE = 0
    DUE = 1
    NEW_OWNER = 2  # due, and what is kept in the slot was another request's
    UNUSED = 3  # level 2 takes no part: there may be no selection, and none is made


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
NUM_COLUMNS = tl.constexpr(len(RowColumn))

NOT_DUE = tl.constexpr(int(Refresh.NOT_DUE))
DUE = tl.constexpr(int(Refresh.DUE))
NEW_OWNER = tl.constexpr(int(Refresh.NEW_OWNER))
UNUSED = tl.constexpr(int(Refresh.UNUSED))


@triton.jit
def row_value(
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    row,
    column: tl.constexpr,
):
    """One value of the table."""
    return tl.load(row_metadata_ptr + row * NUM_COLUMNS + column)


def stack_columns(
    columns: Mapping[RowColumn, np.ndarray | Sequence[int]],  # each [num_rows]
) -> np.ndarray:  # [num_rows, len(RowColumn)], int32
    """The table, whatever the order in which its columns are given; none may be missing."""
    return np.stack([columns[column] for column in RowColumn], axis=1).astype(np.int32)


class OutcomeColumn(IntEnum):
    """Columns of the table."""

    NUM_PROPOSED = 0  # tokens
    NUM_ROUNDS = 1  # of levels 1 and 2 in which it took part
    LEVEL1_ACCEPTED = 2  # tokens
    LEVEL1_REJECTED = 3  # rounds in which level 2 rejected a token


NUM_PROPOSED = tl.constexpr(int(OutcomeColumn.NUM_PROPOSED))
NUM_ROUNDS = tl.constexpr(int(OutcomeColumn.NUM_ROUNDS))
LEVEL1_ACCEPTED = tl.constexpr(int(OutcomeColumn.LEVEL1_ACCEPTED))
LEVEL1_REJECTED = tl.constexpr(int(OutcomeColumn.LEVEL1_REJECTED))
NUM_OUTCOMES = tl.constexpr(len(OutcomeColumn))
