"""Promises of the schedulers: a grammar sees every token that the full pass will verify, accepted
tokens are cached, and a session continues behind the tokens that it kept."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tests.unit.wrapping import wrap
from vllm_triforce.runner_v2 import reports
from vllm_triforce.scheduler.lookahead import PrefixCacheMixin
from vllm_triforce.vllm_patches.engine_args import _choose_scheduler
from vllm_triforce.vllm_patches.stock_behavior import mark


def test_the_scheduler_is_chosen_by_runner_and_scheduling():
    package = "vllm_triforce.scheduler"
    for is_async, is_v2, given, expected in (
        (True, True, None, f"{package}.v2.TriForceAsyncSchedulerV2"),
        (True, True, "some.Scheduler", "some.Scheduler"),
        (False, False, "some.Scheduler", "some.Scheduler"),
        (False, True, None, f"{package}.v2.TriForceSchedulerV2"),
        (False, False, None, f"{package}.v1.TriForceScheduler"),
    ):
        scheduler_config = SimpleNamespace(async_scheduling=is_async, scheduler_cls=given)
        speculative_config = SimpleNamespace(
            num_speculative_tokens=3, num_speculative_tokens_per_batch_size=None
        )
        _choose_scheduler(
            SimpleNamespace(
                scheduler_config=scheduler_config,
                use_v2_model_runner=is_v2,
                speculative_config=speculative_config,
            )
        )
        assert scheduler_config.scheduler_cls == expected
        has_schedule = speculative_config.num_speculative_tokens_per_batch_size is not None
        assert has_schedule is not is_v2


@pytest.fixture
def handler(monkeypatch):
    """Make handlers of proposals that copy on the host."""
    nothing = SimpleNamespace(
        synchronize=lambda: None, record=lambda: None, wait_stream=lambda stream: None
    )

    def init(self, device) -> None:
        self.device, self.copy_stream, self.copy_event = device, nothing, nothing

    monkeypatch.setattr(reports.DraftTokensHandler, "__init__", init)
    monkeypatch.setattr(reports, "async_copy_to_np", lambda tensor: tensor.numpy())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return lambda is_asynchronous: reports.ProposedTokensHandler(None, is_asynchronous)


@pytest.mark.parametrize(
    ("is_asynchronous", "expected"), [(False, [[5, 6], []]), (True, [[5, 6, 0], [0, 0, 0]])]
)
def test_tokens_reported_to_a_grammar(handler, is_asynchronous, expected):
    """A scheduler that waits gets the proposals; one that does not verifies padding as well."""
    its, tokens = handler(is_asynchronous), torch.tensor([[5, 6, 0], [0, 0, 0]])
    batch = SimpleNamespace(req_ids=["a", "b"], has_structured_output_reqs=True)
    nothing = [[0, 0, 0]] * 2 if is_asynchronous else [[], []]
    for lengths, drafts in ((torch.tensor([2, 0]), expected), (None, nothing)):
        its.set_proposals(tokens, lengths)
        its.set_draft_tokens(batch, None)
        assert its.get_draft_tokens().draft_token_ids == drafts


@pytest.mark.parametrize(
    "accepted, computed, is_stale, cached",
    [
        ([7, 8, 9], 102, False, 102),
        ([7, 8], 104, False, 101),  # two more were accepted behind a stop
        ([7], 100, False, None),
        ([7, 8, 9], 0, True, None),
    ],
    ids=["accepted", "stopped", "one token", "preempted"],
)
def test_blocks_that_accepted_tokens_fill_are_cached(accepted, computed, is_stale, cached):
    """The request had a hundred tokens, all but the last computed."""

    class Base:
        def _update_request_with_output(self, request, new_token_ids, is_stale):
            request.num_tokens += len(new_token_ids)
            return new_token_ids, False

    class Scheduler(PrefixCacheMixin, Base):
        pass

    calls = []
    scheduler = Scheduler()
    scheduler.kv_cache_manager = SimpleNamespace(cache_blocks=lambda _, count: calls.append(count))
    request = SimpleNamespace(num_tokens=100, num_computed_tokens=computed)
    assert scheduler._update_request_with_output(request, accepted, is_stale) == (accepted, False)
    assert calls == ([] if cached is None else [cached])


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
    queue = SimpleNamespace(add_request=lambda request: None)
    scheduler.waiting = scheduler.kv_holding_waiting = queue
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
    stock = Scheduler._handle_stopped_request
    stock = getattr(stock, "__wrapped__", stock)
    own = len(PROMPT) + len(ANSWER) - 1
    wanted = own, [*PROMPT, *ANSWER[:-1], *PIECE]
    assert go_on(session(own, 0), stock) == wanted, "what stock vLLM does without speculation"
    its = go_on(session(own + behind, in_flight), wrap("Scheduler._handle_stopped_request", stock))
    assert its == wanted
    is_right = go_on(session(own + behind, in_flight), stock) == wanted
    assert is_right == (behind == in_flight), "vLLM has changed: is the patch still needed?"
