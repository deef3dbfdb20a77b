"""Layout of the table that holds the state of rows and slots on the device.

A *row* is a request in this proposal, a *slot* its place in TriForce's buffers that last from
proposal to proposal, a *state* its place in the model runner's tensors. The host names columns and
values by the enums, kernels by constants of the same names.

The table is int32, [max_rows, ROW_STRIDE]. The host fills a row's columns of ``RowColumn``, kernels
those of ``StateColumn``, then come its drafts of this round and the tokens of its proposal, each
with room for the longest. The columns of ``SlotColumn`` are an exception: those of row n belong to
slot n.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from vllm.triton_utils import tl

from vllm_triforce.config.keys import MAX_NUM_SPECULATIVE_TOKENS


class RowColumn(IntEnum):
    """Columns of the row table that the host fills."""

    BATCH_ROW = 0  # the row's place in the runner's batch
    STATE = 1  # its place in the runner's tensors
    SLOT = 2  # its place in buffers that last from proposal to proposal
    OWNER = 3  # an Owner
    RESERVED = 4  # tokens that its allocated blocks hold
    LIMIT = 5  # length at which the request ends
    WINDOW_START = 6  # index of the first recent token in level 1's window
    MAX_TOKENS = 7  # limit of the proposal's length
    MAX_ROUNDS = 8  # limit of the rounds in which it takes part
    ONE_HOT = 9  # not 0: its proposal is exported with one-hot distributions


class StateColumn(IntEnum):
    """Columns of the row table that kernels fill."""

    SEED = 10  # 64 bits, with the next column
    SEED_HIGH = 11
    TEMPERATURE = 12  # float32; 0 is greedy
    COMPUTED = 13  # tokens with KV, when the proposal began
    LAST_TOKEN = 14  # the newest token of the full pass
    LENGTH = 15  # tokens of the proposal so far
    ROOM = 16  # length that the proposal may reach
    ROUNDS_LEFT = 17  # that the row may still take part in
    TAIL = 18  # first block of the tail of level 2's cache
    NUM_SELECTED = 19  # blocks that level 2 reads before the tail
    NUM_BLOCKS = 20  # allocated blocks
    FIRST_NEWLY_FULL = 21  # first block that became full since the last proposal by level 2
    LAST_NEWLY_FULL = 22  # the end of these blocks, exclusive
    NUM_DRAFTED = 23  # tokens that level 1 drafted in this round
    NUM_ACCEPTED = 24  # of these, the tokens that level 2 accepted
    NUM_EMITTED = 25  # tokens that the last round added to the proposal
    HAS_NAN = 26  # not 0: logits of this proposal had a NaN
    NUM_ROWS = 27  # rows in use, in row 0; a CUDA graph may have been captured for more


class SlotColumn(IntEnum):
    """Columns of the row table whose row is a slot."""

    SUMMARIZED = 28  # full blocks, when level 2 last proposed
    DISABLED = 29  # not 0: logits had a NaN, and the owner is not speculated on any more
    NUM_EXACT = 30  # tokens up to which the tail in the pool of host layers is exact


class OutcomeColumn(IntEnum):
    """Columns of the outcomes that the planner reads, int32, [max_rows, NUM_OUTCOMES]."""

    NUM_PROPOSED = 0  # tokens
    NUM_ROUNDS = 1  # of levels 1 and 2 in which the row took part
    LEVEL1_ACCEPTED = 2  # tokens
    LEVEL1_REJECTED = 3  # rounds in which level 2 rejected a token


class Owner(IntEnum):
    """Owner of level 2's state in a row's slot before this proposal."""

    UNUSED = 0  # level 2 takes no part
    SAME_OWNER = 1
    NEW_OWNER = 2  # another request's


_ENUMS = (RowColumn, StateColumn, SlotColumn, OutcomeColumn, Owner)
globals().update({m.name: tl.constexpr(int(m)) for names in _ENUMS for m in names})
FIRST_DRAFT = 32  # behind all columns
FIRST_PROPOSED = FIRST_DRAFT + MAX_NUM_SPECULATIVE_TOKENS
ROW_LENGTH = FIRST_PROPOSED + MAX_NUM_SPECULATIVE_TOKENS  # even, so that seeds are aligned
DRAFTED, PROPOSED, ROW_STRIDE = map(tl.constexpr, (FIRST_DRAFT, FIRST_PROPOSED, ROW_LENGTH))
NUM_OUTCOMES = tl.constexpr(len(OutcomeColumn))


def __getattr__(name: str) -> Any:
    """Declare the constants above for type checkers."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def stack_columns(
    columns: Mapping[RowColumn, np.ndarray | Sequence[int]],  # each [num_rows]
) -> np.ndarray:  # [num_rows, len(RowColumn)], int32
    """Stack the host's columns in the table's order; a missing one is an error."""
    return np.stack([columns[column] for column in RowColumn], axis=1).astype(np.int32)
