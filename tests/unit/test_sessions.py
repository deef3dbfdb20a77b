"""Promise: a session whose input arrives in pieces goes on behind the tokens that it kept."""

from collections import deque
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tests.unit.wrapping import wrap
from vllm_triforce.config.tag import mark

PROMPT, ANSWER, PIECE = list(range(100)), [7, 8, 9], [1, 2]


def session(num_computed: int, in_flight: int) -> Request:
    """Make a request whose turn has just ended.

    Args:
        num_computed: tokens as the scheduler counts them, those in flight among them.
    """
    params = SamplingParams(max_tokens=9)
    request = Request("one", list(PROMPT), params, None, resumable=True)
    piece = StreamingUpdate(None, PIECE, max_tokens=9, arrival_time=0.0, sampling_params=params)
    request.streaming_queue = deque([piece])
    request.append_output_token_ids(ANSWER)
    request.num_computed_tokens, request.num_output_placeholders = num_computed, in_flight
    request.status = RequestStatus.FINISHED_STOPPED
    return request


def go_on(request: Request, handle) -> tuple[int, list[int]]:
    """Continue with the next piece; return the number of computed tokens and the prompt."""
    speculative_config = SimpleNamespace()
    mark(speculative_config)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.vllm_config = SimpleNamespace(speculative_config=speculative_config)
    scheduler.hash_block_size, scheduler.log_stats = 32, False
    scheduler._enqueue_waiting_request = lambda request: None
    assert handle(scheduler, request) is False
    return request.num_computed_tokens, list(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("behind", "in_flight"),
    [
        (0, 0),  # the last token of the run ended the turn
        (1, 0),
        (4, 0),
        (4, 4),  # an asynchronous scheduler counts what it threw away as in flight
        (9, 9),
    ],
)
def test_a_turn_that_ends_inside_a_run_leaves_nothing_behind(behind, in_flight):
    """Stock without speculation keeps the KV of all tokens but the last."""
    stock = getattr(Scheduler._handle_stopped_request, "__wrapped__", None)
    stock = stock or Scheduler._handle_stopped_request
    own = len(PROMPT) + len(ANSWER) - 1
    wanted = own, [*PROMPT, *ANSWER[:-1], *PIECE]
    assert go_on(session(own, 0), stock) == wanted, "what stock vLLM does without speculation"
    its = go_on(session(own + behind, in_flight), wrap("Scheduler._handle_stopped_request", stock))
    assert its == wanted
    is_right = go_on(session(own + behind, in_flight), stock) == wanted
    assert is_right == (behind == in_flight), "vLLM has changed: is the patch still needed?"
