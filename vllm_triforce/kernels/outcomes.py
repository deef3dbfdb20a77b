"""What comes of each row, for those who plan: a table with a line a row, and its columns.

The host names columns by the enum, kernels by the constants of the same names.
"""

from enum import IntEnum

from vllm.triton_utils import tl


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
