"""What is fed to the models, token by token."""

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.device import DEVICE
from tests.kernels.tensors import VOCAB_SIZE, config_of, counted, init_rows, integers, new_counters
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.kernels.pass_inputs import (
    PassInputs,
    prepare_draft_inputs,
    prepare_target_inputs,
    prepare_window_inputs,
)
from vllm_triforce.kernels.proposals import count_full_pass
from vllm_triforce.kernels.row_table import Owner, RowColumn, SlotColumn, StateColumn, stack_columns
from vllm_triforce.kernels.rows import Rows, SamplingParameters
from vllm_triforce.metrics.counters import DeviceCounter

BLOCK_SIZE = 16
TABLE = {
    RowColumn.BATCH_ROW: [2, 0, 1],
    RowColumn.STATE: [5, 1, 3],
    RowColumn.SLOT: [1, 0, 3],
    RowColumn.OWNER: [Owner.NEW_OWNER, Owner.SAME_OWNER, Owner.SAME_OWNER],
    RowColumn.RESERVED: [640, 112, 160],
    RowColumn.LIMIT: [4096, 4096, 102],
    RowColumn.WINDOW_START: [0, 40, 20],
    RowColumn.MAX_TOKENS: [6, 6, 6],
    RowColumn.MAX_ROUNDS: [2, 3, 1],
    RowColumn.ONE_HOT: [0, 1, 0],
}
COMPUTED = {5: 603, 1: 107, 3: 99}
NUM_SAMPLED = [3, 1, 2]


def begun(num_sampled=NUM_SAMPLED, table=None, **changes) -> Rows:
    """Make three rows of five, before the first round.

    Args:
        table: columns that are other than ``TABLE``'s.
    """
    limits = dict(block_size=BLOCK_SIZE, budget=RetrievalBudget(14, 14, recent=4), table_width=20)
    rows = Rows(config_of(gamma=2, **{**limits, **changes}), 5, VOCAB_SIZE, DEVICE)
    rows.table[:, SlotColumn.SUMMARIZED].copy_(integers([6, 30, 0, 5, 0]))
    num_computed, last = integers([0] * 8), integers([[0]] * 8, torch.int64)
    by_state = torch.arange(8, dtype=torch.float32, device=DEVICE)
    parameters = SamplingParameters(
        temperature=by_state / 4,
        seeds=integers(range(80, 88), torch.int64),
        top_k=integers(range(10, 18)),
        top_p=by_state / 10,
        min_p=by_state / 20,
    )
    for state, computed in COMPUTED.items():
        num_computed[state], last[state] = computed, 100 + state
    columns = torch.from_numpy(stack_columns(TABLE | (table or {}))).to(DEVICE)
    sampled = integers(num_sampled)
    for its in (rows.temperature, rows.top_k, rows.top_p, rows.min_p):
        its.fill_(9)  # of the proposal before
    rows.init(columns, num_computed, sampled, last, parameters)
    return rows


def test_rows_are_drawn_for_as_their_requests_ask():
    rows = begun()
    assert rows.temperature.tolist() == [5 / 4, 1 / 4, 3 / 4, 0, 0], "padding draws nothing"
    assert rows.divisor.tolist() == [5 / 4, 1 / 4, 3 / 4, 1, 1]
    assert rows.seeds[:3].tolist() == [85, 81, 83]
    assert rows.top_k.tolist() == [15, 11, 13, VOCAB_SIZE, VOCAB_SIZE], "padding masks nothing"
    torch.testing.assert_close(rows.top_p.cpu(), torch.tensor([0.5, 0.1, 0.3, 1, 1]))
    torch.testing.assert_close(rows.min_p.cpu(), torch.tensor([0.25, 0.05, 0.15, 0, 0]))
    assert rows.count.item() == 3


def test_rows_begin_after_the_full_pass():
    rows = begun()
    assert rows.computed.tolist() == [603, 107, 99, 0, 0]
    assert rows.table[:3, StateColumn.LAST_TOKEN].tolist() == [105, 101, 103]
    # six; what is reserved; what max_model_len or max_tokens leave
    assert rows.room.tolist() == [6, 5, 1, 0, 0]
    # 603 tokens are 37 full blocks, of which 4 are recent
    assert rows.tail.tolist()[:3] == [33, 2, 2]
    assert rows.num_selected.tolist()[:3] == [10, 2, 2]
    # a new owner of a slot has no summaries
    assert rows.first_newly_full.tolist()[:3] == [0, 6, 5]
    assert rows.last_newly_full.tolist()[:3] == [37, 6, 6]
    assert rows.table[:, SlotColumn.SUMMARIZED].tolist() == [6, 37, 0, 6, 0]
    assert rows.length.tolist() == [0] * 5
    assert rows.table[:, StateColumn.ROUNDS_LEFT].tolist() == [2, 3, 1, 0, 0]


def test_rows_that_cannot_propose_have_no_room():
    assert begun(num_sampled=[0, 1, 2]).room.tolist()[:3] == [6, 0, 1], "in a prefill"
    assert begun(min_context=105).room.tolist()[:3] == [6, 5, 0]
    assert begun(table_width=14).room.tolist()[:3] == [0, 5, 1], "the tail does not fit the table"
    of_rounds = begun(table={RowColumn.MAX_ROUNDS: [1, 0, 1]})
    assert of_rounds.room.tolist()[:3] == [6, 0, 1], "in no round"


def test_rows_that_level_2_takes_no_part_in_need_no_selection():
    rows = begun(table_width=14, table={RowColumn.OWNER: [Owner.UNUSED] * 3})
    assert rows.room.tolist()[:3] == [6, 5, 1], "there is no table to fit into"
    assert rows.table[:, SlotColumn.SUMMARIZED].tolist() == [6, 30, 0, 5, 0], "what is kept stays"


@pytest.mark.parametrize("budget", [RetrievalBudget(6, 20, 2), RetrievalBudget(8, 8, 3)])
def test_the_budget_is_the_hosts(budget):
    contexts = [40, 61, 96, 161, 310]
    config = config_of(gamma=2, block_size=BLOCK_SIZE, budget=budget, table_width=1000)
    rows = Rows(config, 5, VOCAB_SIZE, DEVICE)
    init_rows(rows, [count * BLOCK_SIZE + 3 for count in contexts])
    wanted = [
        min(max(0, count - budget.recent), budget.of(count) - budget.recent) for count in contexts
    ]
    assert rows.num_selected.tolist() == wanted
    assert len(set(wanted)) >= (1 if budget.min_blocks == budget.max_blocks else 4)


def tokens_of(rows: Rows, row: int) -> tuple[list[int], torch.Tensor]:
    """Return all tokens of a row, and vLLM's, whose end is not written yet."""
    computed, length = int(rows.computed[row]), int(rows.length[row])
    known = [(7 * i + row) % 251 for i in range(computed + 1)]
    return known + rows.proposal[row, :length].tolist(), torch.tensor(known)


@pytest.mark.parametrize("query_len", [3, 7])
@pytest.mark.parametrize("capacity", [64, 600])
def test_windows_are_fed_the_newest_tokens(query_len, capacity):
    rows, sinks, per_slot = begun(), 4, 40
    rows.length.copy_(integers([2, 0, 1, 0, 0]))
    rows.proposal.copy_(torch.arange(30, device=DEVICE).view(5, 6) + 200)
    rows.row_metadata[:, RowColumn.WINDOW_START] = integers([575, 102, 20, 0, 0])
    all_tokens = torch.zeros(8, 1000, dtype=torch.int32)
    for row in range(3):
        known = tokens_of(rows, row)[1]
        all_tokens[TABLE[RowColumn.STATE][row], : len(known)] = known
    inputs = PassInputs(5, query_len, 5, DEVICE)
    prepare_window_inputs(
        rows, inputs, 4, all_tokens.to(DEVICE), sinks, capacity, per_slot * BLOCK_SIZE
    )
    for row in range(3):
        tokens = tokens_of(rows, row)[0]
        start = int(rows.row_metadata[row, RowColumn.WINDOW_START])
        feed = oracles.window_feed(tokens, query_len, sinks, start, capacity)
        for j, fed in enumerate(feed):
            at = row * query_len + j
            if fed is None:
                assert inputs.slot_mapping[at] == -1
                continue
            place = TABLE[RowColumn.SLOT][row] * per_slot * BLOCK_SIZE + fed[1]
            assert (inputs.token_ids[at], inputs.positions[at]) == fed
            assert inputs.slot_mapping[at] == place
        expected = max(min(sinks + len(tokens) - start, capacity), query_len)
        assert inputs.seq_lens[row] == expected
    assert (inputs.slot_mapping[3 * query_len : 4 * query_len] == -1).all(), "a padded row"
    assert inputs.seq_lens[3] == query_len


def test_drafts_follow_the_fed_tokens():
    rows, inputs = begun(), PassInputs(5, 1, 5, DEVICE)
    rows.drafted.copy_(integers([[11, 0], [12, 0], [13, 0], [0, 0], [0, 0]]))
    inputs.seq_lens.copy_(integers([20, 64, 33, 9, 9]))
    prepare_draft_inputs(rows, inputs, 4, 1, 64, 64)
    assert inputs.token_ids.tolist()[:3] == [11, 12, 13]
    assert inputs.positions.tolist()[:3] == [20, 63, 33]
    assert inputs.seq_lens.tolist() == [21, 64, 34, 1, 9]
    # slots 1, 0, 3; the second row's window is full
    assert inputs.slot_mapping.tolist()[:4] == [64 + 20, -1, 3 * 64 + 33, -1]


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_target_is_fed_the_newest_token_and_the_drafts(heads):
    rows = begun()
    rows.length.copy_(integers([4, 0, 1, 0, 0]))
    rows.proposal.copy_(torch.arange(30, device=DEVICE).view(5, 6) + 200)
    rows.drafted.copy_(integers([[11, 12], [13, 14], [15, 16], [0, 0], [0, 0]]))
    rows.num_drafted.copy_(integers([2, 1, 2, 2, 2]))
    tables = torch.arange(3 * 40, dtype=torch.int32, device=DEVICE).view(3, 40)
    inputs = PassInputs(5, 3, 5 * heads, DEVICE)
    dense = integers([0] * 5)
    prepare_target_inputs(rows, inputs, 4, tables, dense, BLOCK_SIZE, 4095)
    # Of six, four are there: the pass adds one, so one draft is verified; the third row is full.
    assert rows.num_drafted.tolist()[:4] == [1, 1, 0, 0]
    fed = inputs.token_ids.view(5, 3)
    assert fed[0, :2].tolist() == [203, 11] and fed[1, :2].tolist() == [101, 13]
    for row, (position, drafts) in enumerate([(607, 1), (107, 1)]):
        for j in range(3):
            at = row * 3 + j
            block = int(tables[row, (position + j) // BLOCK_SIZE])
            place = block * BLOCK_SIZE + (position + j) % BLOCK_SIZE
            assert inputs.positions[at] == position + j
            assert inputs.slot_mapping[at] == (place if j <= drafts else -1)
        assert dense[row] == position + 3
        own = inputs.seq_lens[row * heads : (row + 1) * heads]
        skipped = (rows.tail[row] - rows.num_selected[row]) * BLOCK_SIZE
        assert (own == position + 3 - skipped).all()
    assert (inputs.slot_mapping[6:12] == -1).all()
    assert (inputs.seq_lens[2 * heads : 4 * heads] == 3).all()


def test_full_passes_are_counted_without_padding():
    counters = new_counters()
    # scheduled 6 of 6 proposed, all right; 6 of 2, one right; none; in a prefill
    count_full_pass(
        counters,
        integers([6, 6, 0, 6]),
        integers([2, 0, 1, 3]),
        integers([7, 2, 1, 0]),
        integers([2, 4, 6, 6]),
    )
    assert counted(counters) == {
        DeviceCounter.NUM_LEVEL2_DRAFTED: 8,
        DeviceCounter.NUM_LEVEL2_ACCEPTED: 7,
        DeviceCounter.NUM_LEVEL3_REJECTIONS: 1,
        DeviceCounter.NUM_LEVEL3_STEPS: 2,
    }
