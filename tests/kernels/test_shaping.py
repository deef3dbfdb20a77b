"""Promise: penalties, ``bad_words`` and biases change a draft's logits as vLLM's sampler changes
the full pass's behind the same tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.states import RequestState

from tests.kernels.device import DEVICE
from tests.kernels.tensors import config_of, integers
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing

VOCAB_SIZE, GAMMA, MAX_PROPOSAL, NUM_STATES, MAX_LEN = 77, 3, 6, 7, 20
PROMPT_LEN = 5
NUM_ROWS = 6
ENDS_LATE = dict(min_tokens=35, max_tokens=40, stop_token_ids=[4])
# By state: what each request asks. Nothing, everything, then one thing each.
ASKED = [
    SamplingParams(),
    SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.7,
        _bad_words_token_ids=[[9], [1, 2, 3], [2, 4], [31, 7]],
        logit_bias={3: 2.5, 8: -4.0},
        min_tokens=3,  # reached within the round
        stop_token_ids=[6, 70],
    ),
    SamplingParams(repetition_penalty=1.05),
    SamplingParams(_bad_words_token_ids=[[7, 8], [5, 7, 8]]),
    # With a grammar the end is let in again where nothing else is left.
    SamplingParams(
        allowed_token_ids=[4], structured_outputs=StructuredOutputsParams(regex="a"), **ENDS_LATE
    ),
    SamplingParams(_bad_words_token_ids=[[9]], presence_penalty=2.0),
    SamplingParams(allowed_token_ids=[1, 4, 60], **ENDS_LATE),
]


@pytest.fixture
def made():
    """Make rows with proposals of different lengths, their processing, and vLLM's states."""
    torch.manual_seed(2)
    rows = Rows(config_of(GAMMA, MAX_PROPOSAL), 7, VOCAB_SIZE, DEVICE)
    rows.num_rows = NUM_ROWS
    rows.count.fill_(NUM_ROWS)
    rows.row_metadata[:NUM_ROWS, RowColumn.STATE] = integers([3, 1, 4, 0, 6, 5])
    rows.computed[:NUM_ROWS] = integers([8, PROMPT_LEN, 14, PROMPT_LEN, 12, 9])
    rows.length[:NUM_ROWS] = integers([1, 0, 0, 4, 6, 3])
    rows.proposal.random_(VOCAB_SIZE)
    rows.drafted.random_(VOCAB_SIZE)
    known = torch.randint(VOCAB_SIZE, (NUM_STATES, MAX_LEN)).to(DEVICE, torch.int32)
    # Of words, the beginnings: across what is proposed and drafted, or known and drafted, and
    # across the prompt and what is known, where no word may begin: "1 2 3" does not, "2 4" does.
    rows.proposal[0, 0] = 5
    rows.drafted[0, :3] = integers([7, 7, 8])
    known[1, PROMPT_LEN - 1 : PROMPT_LEN + 1] = integers([1, 2])
    rows.drafted[1, :3] = integers([1, 2, 31])
    req_states = RequestState(
        NUM_STATES, MAX_LEN, MAX_LEN, MAX_PROPOSAL, VOCAB_SIZE, DEVICE, use_dense_all_token_ids=True
    )
    req_states.all_token_ids.gpu.copy_(known)
    for lengths in (req_states.prompt_len, req_states.prefill_len):
        lengths.np.fill(PROMPT_LEN)
        lengths.copy_to_uva()
    processors = [of(None, req_states) for of in (LogitBiasState, PenaltiesState, BadWordsState)]
    for processor in processors:
        for state, params in enumerate(ASKED):
            processor.add_request(state, params)
        processor.apply_staged_writes()
    processors[1].output_bin_counts.random_(3)
    sampler = SimpleNamespace(logits_processors=[*processors, None])
    return rows, LogitsProcessing(sampler, req_states, rows), (*processors, req_states)


def by_vllm(logits: torch.Tensor, state: int, begin: int, fed: list[int], of_vllm) -> torch.Tensor:
    """Process logits behind the last fed token as vLLM's sampler does; ``begin`` indexes the first.

    Args:
        logits: [vocab_size].
    """
    *processors, req_states = of_vllm
    count = len(fed)
    places = torch.arange(count, device=DEVICE).int()
    context = SimpleNamespace(
        idx_mapping_np=np.array([state]),
        expanded_idx_mapping=integers([state] * count),
        pos=begin + places.long(),
        input_ids=integers(fed),
        expanded_local_pos=places,
    )
    req_states.total_len.gpu.fill_(begin + 1)
    flat = logits.repeat(count, 1)
    for processor in processors:
        flat = processor.apply(flat, context)
    return flat[-1]


def expected(rows, logits, query_len: int, first_place: int, of_vllm) -> torch.Tensor:
    """Process logits [num_rows * query_len, vocab_size] as vLLM does."""
    found = []
    for i in range(len(logits)):
        row, place = i // query_len, first_place + i % query_len
        state, begin = int(rows.row_metadata[row, RowColumn.STATE]), int(rows.computed[row])
        newest = int(of_vllm[-1].all_token_ids.gpu[state, begin])
        proposed = rows.proposal[row, : rows.length[row]].tolist()
        fed = [newest, *proposed, *rows.drafted[row, :place].tolist()]
        found.append(by_vllm(logits[i].float(), state, begin, fed, of_vllm))
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len, first_place", [(1, 0), (1, 1), (1, GAMMA), (GAMMA + 1, 0)])
def test_logits_are_shaped_as_behind_the_same_tokens_in_a_full_pass(
    made, query_len, first_place, dtype
):
    rows, shaping, of_vllm = made
    # A padded vocabulary: rows lie further apart than they are long.
    logits = torch.randn(NUM_ROWS * query_len, VOCAB_SIZE + 3, device=DEVICE).to(dtype)[
        :, :VOCAB_SIZE
    ]
    before = logits.clone()
    right = expected(rows, before, query_len, first_place, of_vllm)
    shaping.begin()
    shaped = shaping.apply(logits, first_place)
    assert shaped.dtype == torch.float32
    torch.testing.assert_close(shaped, right)
    assert (right == -torch.inf).any(), "words end, and tokens are not allowed"
    of_nothing = slice(3 * query_len, 4 * query_len)
    assert torch.equal(shaped[of_nothing], before[of_nothing].float()), "who asked for nothing"


def test_rows_of_a_larger_graph_that_are_nobodys_are_left_alone(made):
    rows, shaping, _ = made
    shaping.begin()
    rows.count.fill_(1)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, device=DEVICE)
    before = logits.clone()
    shaped = shaping.apply(logits, 0)
    assert torch.equal(shaped[5], before[5]), "it has penalties and words, and is not counted"


def test_parameters_are_read_anew_for_each_proposal(made):
    """vLLM writes parameters to another buffer at every step."""
    _, shaping, (_, penalties, *_) = made
    shaping.begin()
    logits = torch.ones(NUM_ROWS, VOCAB_SIZE, device=DEVICE)
    before = shaping.apply(logits.clone(), 0)
    penalties.presence_penalty.np.fill(9.0)
    penalties.presence_penalty.copy_to_uva()
    assert torch.equal(shaping.apply(logits.clone(), 0), before), "within a proposal it stays"
    shaping.begin()
    assert not torch.equal(shaping.apply(logits.clone(), 0), before)


def test_whether_anybody_asks_is_known_on_the_host(made):
    _, shaping, _ = made
    asked = [shaping.is_needed(np.array([state])) for state in range(NUM_STATES)]
    assert asked == [False, *[True] * (NUM_STATES - 1)]
    assert shaping.is_needed(np.array([0, 3])) and not shaping.is_needed(np.array([0, 0]))


def test_a_sampler_that_does_it_in_another_order_is_refused(made):
    rows, _, (bias, penalties, words, req_states) = made
    sampler = SimpleNamespace(logits_processors=[penalties, bias, words])
    with pytest.raises(RuntimeError, match=r"'PenaltiesState', 'LogitBiasState'.*in this order"):
        LogitsProcessing(sampler, req_states, rows)
