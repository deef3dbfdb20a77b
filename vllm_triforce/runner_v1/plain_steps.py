"""Plain steps: steps without speculation run as in stock vLLM.

Once speculation is configured, Model Runner V1 prepares every batch for the rejection sampler and
the drafter. For a step that has no drafts and needs none, ``PlainSteps`` sets the runner's
``speculative_config`` to None. The runner then takes the path that it takes without TriForce. The
same wrapper times the steps for the controller.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_triforce.controller import Controller, StepTime
from vllm_triforce.controller.controller import Planned
from vllm_triforce.core.limits import sampling_seed
from vllm_triforce.core.messages import BLOCKS_KEPT
from vllm_triforce.core.models import states_read
from vllm_triforce.runner_v1.batch import forget_blocks
from vllm_triforce.vllm_patches import swaps


class PlainSteps:
    """Wraps the runner's ``execute_model`` and ``sample_tokens``.

    Args:
        on_new_blocks: called with the blocks that a step will overwrite, by KV cache group, if
            level 2 has summaries of blocks.
        on_finished: called after the runner has removed finished requests.
        on_states: takes a step's ``SchedulerOutput`` and the target's states that a head reads,
            if there is one.
    """

    def __init__(
        self,
        runner,
        controller: Controller,
        on_new_blocks: Callable[[tuple[list[int], ...]], None] | None,
        on_finished: Callable[[], None],
        on_states: Callable[[Any, Sequence], None] | None = None,
    ) -> None:
        self._runner = runner
        self._controller = controller
        self._on_new_blocks = on_new_blocks
        self._on_finished = on_finished
        self._on_states = on_states
        self._speculative_config = runner.speculative_config
        self._execute_model = swaps.EXECUTE_MODEL.set(runner, self.execute_model)
        self._sample_tokens = swaps.SAMPLE_TOKENS.set(runner, self.sample_tokens)
        self._last_step: tuple[float, StepTime, Planned | None] | None = None
        """Start and time of the last step, if it is timed, and the plan for its drafts. Its seconds
        are known when the next step begins."""
        self.propose_seconds = 0.0
        """Seconds that the current step spends on its proposal."""
        self.delays_proposals = False
        """True if this step gives a request its first token, which does not wait for proposals.
        Those of seeded requests are made, as their samples must not depend on arrivals."""
        self._present: frozenset[str] = frozenset()
        """Requests of the last step. A request may be skipped for some steps without notice."""
        self._seeded: set[str] = set()
        """Those with a seed."""
        tables = runner.input_batch.block_table.block_tables
        self._block_sizes = [table.block_size for table in tables]

    def execute_model(self, scheduler_output, *args, **kwargs):
        """Run a step, as a plain one if nothing will be proposed."""
        forget_blocks(self._runner, BLOCKS_KEPT.of(scheduler_output) or {})
        backoff = self._controller.backoff
        backoff.begin_step()
        has_changed = self._note_changes(scheduler_output)
        last = self._last_step
        # At rest few steps are timed, but the last one with drafts, which ends here, always.
        if backoff.wants_times or (last is not None and last[1].num_drafts):
            self._time_step(scheduler_output, has_changed)
        else:
            self._last_step, self.propose_seconds = None, 0.0
        if self._on_new_blocks is not None:
            self._announce_new_blocks(scheduler_output, self._on_new_blocks)
        gives_first_token = self._note_prefills(scheduler_output)
        self.delays_proposals = gives_first_token and bool(self._controller.chooses)
        is_prefill = self.delays_proposals and not self._seeded
        has_no_room = not scheduler_output.num_spec_tokens_to_schedule
        has_drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        if not has_drafts and (backoff.is_resting or is_prefill or has_no_room):
            swaps.SPECULATIVE_CONFIG.set(self._runner, None)
        output = self._execute_model(scheduler_output, *args, **kwargs)
        if scheduler_output.finished_req_ids:
            self._on_finished()
        if output is not None:  # no tokens will be sampled
            self._restore()
        elif self._on_states is not None:
            state = self._runner.execute_model_state
            states = states_read(state.hidden_states, state.aux_hidden_states)
            self._on_states(scheduler_output, states)
        return output

    def sample_tokens(self, *args, **kwargs):
        """Sample the step's tokens and end the plain step, if it was one."""
        try:
            return self._sample_tokens(*args, **kwargs)
        finally:
            self._restore()

    def _restore(self) -> None:
        swaps.SPECULATIVE_CONFIG.set(self._runner, self._speculative_config)

    def _note_changes(self, scheduler_output) -> bool:
        """Report new and finished requests to the controller.

        Returns:
            True if this step's requests differ from the last step's.
        """
        present = scheduler_output.num_scheduled_tokens.keys()
        new = {request.req_id: request for request in scheduler_output.scheduled_new_reqs}
        if present == self._present and not new:
            return False
        # A new request may have the id of one that left.
        joined = (present - self._present) | new.keys()
        self._present = frozenset(present)
        requests = self._runner.requests | new
        self._seeded = {
            i for i in present if sampling_seed(requests[i].sampling_params) is not None
        }
        if joined & self._seeded:
            self._controller.seeded_request_joined()
        if joined - new.keys():  # resumed requests, whose contexts may be long
            self._controller.requests_joined()
        return True

    def _note_prefills(self, scheduler_output) -> bool:
        """Report requests whose prefill ends in this step to the controller.

        Returns:
            True if there are any: their first tokens leave with this step.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        prefills = [
            (request.req_id, request.num_computed_tokens, len(request.prompt_token_ids or ()))
            for request in scheduler_output.scheduled_new_reqs
        ]
        prefills += (
            (request_id, num_computed, self._runner.requests[request_id].num_prompt_tokens)
            for request_id, num_computed, num_output in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens
            )
            if not num_output
        )
        done = {i for i, computed, num_prompt in prefills if computed + scheduled[i] >= num_prompt}
        if done - self._seeded:
            self._controller.requests_joined()
        return bool(done)

    def _announce_new_blocks(self, scheduler_output, on_new_blocks) -> None:
        """Call ``on_new_blocks`` with the blocks that this step will overwrite."""
        has_connector = scheduler_output.kv_connector_metadata is not None
        for request in scheduler_output.scheduled_new_reqs:
            # Blocks of a cached prefix are not written, unless a connector fills them.
            num_kept = 0 if has_connector else request.num_computed_tokens
            on_new_blocks(
                tuple(
                    ids[num_kept // size :]
                    for ids, size in zip(request.block_ids, self._block_sizes)
                )
            )
        for block_ids in scheduler_output.scheduled_cached_reqs.new_block_ids:
            if block_ids is not None:
                on_new_blocks(block_ids)

    def _time_step(self, scheduler_output, has_changed: bool) -> None:
        """Report the last step's time to the controller and start timing this step.

        A step is timed only if it decodes the same requests as the next one.
        """
        if self._controller.measured is None:
            return
        now = time.perf_counter()
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        last, self._last_step = self._last_step, None
        proposal_seconds, self.propose_seconds = self.propose_seconds, 0.0
        planned = self._controller.take_plan()
        if has_changed or not scheduled:
            return
        if last is not None:
            start, step, last_planned = last
            step.seconds = now - start - proposal_seconds
            self._controller.observe_step(step, last_planned)
        cached = scheduler_output.scheduled_cached_reqs
        tokens = [scheduled[request_id] for request_id in cached.req_ids]
        decode_tokens = [1 + len(drafts.get(request_id, ())) for request_id in cached.req_ids]
        if tokens == decode_tokens and (drafts or self._controller.backoff.is_settled):
            step = StepTime(
                self._runner.input_batch.all_greedy,
                tokens,
                cached.num_computed_tokens,
                seconds=0.0,
                num_drafts=sum(map(len, drafts.values())),
                proposal_seconds=proposal_seconds,
                num_verifying=len(drafts),
            )
            self._last_step = now, step, planned
