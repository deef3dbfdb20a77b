"""Promises: under asynchronous scheduling a grammar sees everything that the full pass will
verify; what accepted tokens fill is cached."""

from types import SimpleNamespace

import numpy as np
import pytest


def test_the_scheduler_is_chosen_by_runner_and_scheduling():
    from vllm_triforce.vllm_patches.engine_args import _choose_scheduler

    package = "vllm_triforce.scheduler"
    for is_async, is_v2, given, expected in (
        (True, True, None, f"{package}.v2.TriForceAsyncSchedulerV2"),
        (True, True, "some.Scheduler", "some.Scheduler"),
        (False, False, "some.Scheduler", "some.Scheduler"),
        (False, True, None, f"{package}.v2.TriForceSchedulerV2"),
        (False, False, None, f"{package}.v1.TriForceScheduler"),
    ):
        scheduler_config = SimpleNamespace(async_scheduling=is_async, scheduler_cls=given)
        _choose_scheduler(
            SimpleNamespace(scheduler_config=scheduler_config, use_v2_model_runner=is_v2)
        )
        assert scheduler_config.scheduler_cls == expected


@pytest.mark.parametrize(
    ("is_asynchronous", "expected"), [(False, [[5, 6], []]), (True, [[5, 6, 0], [0, 0, 0]])]
)
def test_what_a_grammar_sees(is_asynchronous, expected):
    """A scheduler that waits gets the proposals; one that does not verifies padding as well."""
    from vllm_triforce.runner_v2.speculator import ProposedTokensHandler

    handler = object.__new__(ProposedTokensHandler)
    handler._is_asynchronous, handler.req_ids, handler._max_tokens = is_asynchronous, ["a", "b"], 3
    handler.copy_event = SimpleNamespace(synchronize=lambda: None)
    handler._host_arrays = np.array([[5, 6, 0], [0, 0, 0]]), np.array([2, 0])
    assert handler.get_draft_tokens().draft_token_ids == expected
    handler._host_arrays = None
    nothing = [[0, 0, 0]] * 2 if is_asynchronous else [[], []]
    assert handler.get_draft_tokens().draft_token_ids == nothing


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
    """Of a request that had a hundred tokens, all but the last of which were computed."""
    from vllm_triforce.scheduler.lookahead import PrefixCacheMixin

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
