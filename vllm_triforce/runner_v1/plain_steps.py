"""Steps in which nothing is speculated on: on Model Runner V1 they are stock vLLM's.

Once speculation is configured, vLLM prepares every batch for the rejection sampler and the
drafter. For a step that has no drafts and wants none, the runner is told that no speculation is
configured; it then takes the path that it takes without TriForce, but for top-p on a CPU, which
keeps the same tokens faster (``top_p.py``). The same place sees how long steps take, which the
controller needs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_triforce.controller import Controller, StepTime
from vllm_triforce.core.eligibility import seed_of_draws
from vllm_triforce.runner_v1.batch import forget_blocks
from vllm_triforce.runner_v1.top_p import FastTopP
from vllm_triforce.scheduler.lookahead import blocks_kept
from vllm_triforce.scheduler.placeholders import without_placeholders, without_their_rows
from vllm_triforce.vllm_patches import swaps


@dataclass
class _Step:
    """A step of decoding whose time can be measured: the next one begins when it has ended."""

    start: float
    request_ids: frozenset[str]
    tokens: list[int]
    contexts: list[int]
    num_drafts: int
    is_greedy: bool
    is_reevaluation: bool
    planned: object
    """The controller's plan for its drafts."""
    proposal_seconds: float
    """Of its drafts' proposal, in the step before."""


@dataclass
class _PrefillState:
    """A prompt that is being read."""

    num_tokens: int
    has_seed: bool


class PlainSteps:
    """Wraps a runner's methods of a step.

    Args:
        recorder: of the full pass's queries, which a plain step does not need.
        on_new_blocks: told of blocks that a step will write anew, by KV cache group.
        on_finished: called once the runner has forgotten requests that have left.
    """

    def __init__(
        self,
        runner,
        controller: Controller,
        recorder,
        on_new_blocks: Callable[[tuple[list[int], ...]], None],
        on_finished: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._controller = controller
        self._recorder = recorder
        self._on_new_blocks = on_new_blocks
        self._on_finished = on_finished
        self._speculative_config = runner.speculative_config
        self._execute_model = swaps.EXECUTE_MODEL.set(runner, self.execute_model)
        self._sample_tokens = swaps.SAMPLE_TOKENS.set(runner, self.sample_tokens)
        self._sample = swaps.SAMPLE.set(runner, self.sample)
        self._last: _Step | None = None
        self._propose_seconds = 0.0
        self._present: frozenset[str] = frozenset()
        """The requests of the last step: one may have to wait, and come back without notice."""
        self._has_seed = False
        """Whether one of them has."""
        self._reading: dict[str, _PrefillState] = {}
        """Requests without a first token yet."""
        self._scheduled: dict[str, list[int]] = {}
        self._dropped: dict[str, int] = {}
        tables = runner.input_batch.block_table.block_tables
        self._block_sizes = [table.block_size for table in tables]
        self._masks = FastTopP() if runner.device.type == "cpu" else None

    def add_propose_seconds(self, seconds: float) -> None:
        """What of the present step is the proposal's time."""
        self._propose_seconds += seconds

    def execute_model(self, scheduler_output, *args, **kwargs):
        forget_blocks(self._runner, blocks_kept(scheduler_output))
        scheduler_output, self._dropped = without_placeholders(scheduler_output)
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        backoff = self._controller.backoff
        backoff.begin_step()
        changed = self._note_changes(scheduler_output)
        if backoff.wants_times:
            self._measure(scheduler_output, changed)
        else:
            self._last, self._propose_seconds = None, 0.0
        self._announce_new_blocks(scheduler_output)
        # No proposal keeps a first token waiting; only a seeded request's do not depend on who
        # arrives.
        gives_first = (
            self._note_prompts_read(scheduler_output)
            and "context" in self._controller.chooses
            and not self._has_seed
        )
        is_plain = not self._scheduled and (backoff.is_resting or gives_first)
        self._recorder.paused = is_plain
        if is_plain:
            swaps.SPECULATIVE_CONFIG.set(self._runner, None)
        output = self._execute_model(scheduler_output, *args, **kwargs)
        if scheduler_output.finished_req_ids:
            self._on_finished()
        if output is not None:  # no tokens will be sampled
            self._restore()
        return output

    def _note_changes(self, scheduler_output) -> bool:
        """Whether this step has other requests than the last one."""
        for name in scheduler_output.finished_req_ids:
            self._reading.pop(name, None)
        present = scheduler_output.num_scheduled_tokens.keys()
        new = {request.req_id: request for request in scheduler_output.scheduled_new_reqs}
        if present == self._present and not new:
            return False
        joined = (present - self._present) | new.keys()  # of the name of one that left, maybe
        self._present = frozenset(present)
        known = self._runner.requests
        params = {name: (new.get(name) or known[name]).sampling_params for name in present}
        seeded = {name for name, its in params.items() if seed_of_draws(its) is not None}
        self._has_seed = bool(seeded)
        if joined & seeded:
            self._controller.seeded_request_joined()
        if joined - new.keys():  # who had to wait, or lost its blocks, and may be long
            self._controller.requests_joined()
        for name, request in new.items():
            num_tokens = len(request.prompt_token_ids or ())
            self._reading[name] = _PrefillState(num_tokens, name in seeded)
        return True

    def _note_prompts_read(self, scheduler_output) -> bool:
        """Whether somebody's first token leaves with this step, whose prompt has been read."""
        if not self._reading:
            return False
        scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        computed |= {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        done = {
            name: reading.has_seed
            for name, reading in self._reading.items()
            if name in scheduled and computed.get(name, 0) + scheduled[name] >= reading.num_tokens
        }
        for name in done:
            del self._reading[name]
        if not all(done.values()):
            self._controller.requests_joined()
        return bool(done)

    def sample(self, logits, spec_decode_metadata):
        """A batch that has no drafts, but may get some, needs no rejection sampler (which fails
        on a batch with top-k and no drafts at all)."""
        if spec_decode_metadata is not None and not spec_decode_metadata.max_spec_len:
            spec_decode_metadata = None
        if self._masks is None or self._runner.input_batch.no_top_p:
            return self._sample(logits, spec_decode_metadata)
        with self._masks:
            return self._sample(logits, spec_decode_metadata)

    def sample_tokens(self, grammar_output, *args, **kwargs):
        grammar_output = without_their_rows(grammar_output, self._scheduled, self._dropped)
        try:
            return self._sample_tokens(grammar_output, *args, **kwargs)
        finally:
            self._restore()

    def _restore(self) -> None:
        swaps.SPECULATIVE_CONFIG.set(self._runner, self._speculative_config)
        self._recorder.paused = False

    def _announce_new_blocks(self, scheduler_output) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            # Those of a prefix that was found in the cache are not written, unless a connector
            # fills them from elsewhere.
            from_elsewhere = scheduler_output.kv_connector_metadata is not None
            found = 0 if from_elsewhere else request.num_computed_tokens
            self._on_new_blocks(
                tuple(
                    ids[found // size :] for ids, size in zip(request.block_ids, self._block_sizes)
                )
            )
        for block_ids in scheduler_output.scheduled_cached_reqs.new_block_ids:
            if block_ids is not None:
                self._on_new_blocks(block_ids)

    def _measure(self, scheduler_output, changed: bool) -> None:
        """Hands the time of the step before to the controller, and begins this one's."""
        measured = self._controller.measured
        if measured is None:
            return
        now = time.perf_counter()
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        last, self._last = self._last, None
        proposal_seconds, self._propose_seconds = self._propose_seconds, 0.0
        planned = self._controller.take_plan()
        if changed or not scheduled:
            return
        backoff = self._controller.backoff
        if last is not None and last.request_ids == scheduled.keys():
            seconds = now - last.start
            if not last.is_reevaluation:
                seconds -= proposal_seconds
            if backoff.is_resting or not last.is_reevaluation:
                self._controller.observe_step(
                    StepTime(
                        last.is_greedy,
                        last.tokens,
                        last.contexts,
                        seconds,
                        last.num_drafts,
                        last.proposal_seconds,
                        is_reevaluation=last.is_reevaluation,
                    ),
                    last.planned,
                )
        cached = scheduler_output.scheduled_cached_reqs
        tokens = [scheduled[request_id] for request_id in cached.req_ids]
        expected = [1 + len(drafts.get(request_id, ())) for request_id in cached.req_ids]
        if tokens == expected and (drafts or backoff.is_settled or backoff.is_reevaluation):
            self._last = _Step(
                now,
                frozenset(cached.req_ids),
                tokens,
                cached.num_computed_tokens,
                sum(map(len, drafts.values())),
                self._runner.input_batch.all_greedy,
                backoff.is_reevaluation,
                planned,
                proposal_seconds,
            )
