"""Schedulers for Model Runner V2, whose steps carry plans.

An asynchronous scheduler runs ahead of the worker, and the worker ahead of its device. Neither sees
the proposals in time, so the scheduler plans them. A request without a planned proposal gets no
placeholders and is verified as without speculation.

    scheduler: plan a step and send the plan with it             core/messages.py
    worker: propose as planned; report with the next output      core/messages.py
    scheduler: learn from the report and the times of outputs    controller/async_controller.py

The report also names requests whose logits had a NaN; they get no further plans.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.config import read_config
from vllm_triforce.config.draft_sources import MODEL_SOURCE, SOURCES
from vllm_triforce.controller import Candidate, Controller, CostModel, StepTime
from vllm_triforce.controller.async_controller import AsyncController, Outcome
from vllm_triforce.controller.lengths import fixed_choice
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.limits import is_greedy, proposal_limit
from vllm_triforce.core.messages import PLAN, REPORT, StepPlan, StepReport
from vllm_triforce.scheduler.grammar_masks import GrammarMaskMixin
from vllm_triforce.scheduler.lookahead import LookaheadMixin, PrefixCacheMixin, has_seed
from vllm_triforce.scheduler.stats import StatsMixin


class StepPlanMixin(LookaheadMixin, StatsMixin):
    """Mixin for vLLM's schedulers: each step carries its plan."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._config = config = read_config(self.vllm_config)[0]
        self._sources, self._max_batch = config.sources, config.max_batch
        self._drafts_text_only = config.levels == "1,3" and self._sources == (MODEL_SOURCE,)
        self._num_slots = min(self.max_num_running_reqs, config.max_speculating_seqs)
        self._with_slots: set[str] = set()
        """Ids of requests with a slot of the worker's, kept until they end or lose their blocks."""
        self._disabled: set[str] = set()
        """Ids of requests without further speculation, because their logits had a NaN."""
        self.decisions: AsyncController | None = None
        if config.adaptive_keys:
            traits = [SOURCES[source].traits() for source in self._sources]
            self.decisions = AsyncController(
                Controller(
                    config,
                    traits,
                    whole_rounds=True,
                    clock=lambda: self.clock(),
                    count_step=lambda *seconds: self.step_counts.add_step_seconds(*seconds),
                ),
                self._sources[0],
            )
        self._num_steps = 0
        # Time and request ids of the last output.
        self._last_time, self._last_ids = 0.0, frozenset[str]()

    # Before a step.

    def _update_after_schedule(self, scheduler_output):
        super()._update_after_schedule(scheduler_output)
        self._disabled &= self.requests.keys()
        self._with_slots &= {request.request_id for request in self.running} - self._disabled
        if self.decisions is not None:
            for request_id in scheduler_output.finished_req_ids:
                self.decisions.release(request_id)
        request_ids = scheduler_output.num_scheduled_tokens
        max_tokens, num_plain = {}, 0
        may_propose = len(request_ids) <= self._max_batch
        for request_id in request_ids:
            request = self.requests[request_id]
            if length := self._max_tokens(request) if may_propose else 0:
                max_tokens[request_id] = length
            elif not request.is_prefill_chunk:
                num_plain += 1
        plan = self.plan_step(max_tokens, num_plain, request_ids)
        plan = self._fit_to_room(scheduler_output, plan)
        PLAN.attach(scheduler_output, plan)
        for request_id in request_ids:
            request, planned = self.requests[request_id], plan.proposing.get(request_id)
            if request.spec_token_ids:
                num_tokens = 0 if planned is None else planned.num_tokens
                request.spec_token_ids = request.spec_token_ids[:num_tokens]

    def _fit_to_room(self, scheduler_output, plan: StepPlan) -> StepPlan:
        """Shorten the plan to the next step's spare tokens and to the free KV blocks."""
        if not plan.proposing:
            return plan
        wanted = {request_id: planned.num_tokens for request_id, planned in plan.proposing.items()}
        needs = self._next_needs()
        lent = self._lend(scheduler_output, self._share_tokens(wanted, needs), needs)
        if lent == wanted:
            return plan
        proposing = {
            request_id: replace(planned, num_tokens=lent[request_id])
            for request_id, planned in plan.proposing.items()
            if lent[request_id]
        }
        return replace(plan, proposing=proposing)

    def plan_step(
        self, max_tokens: Mapping[str, int], num_plain: int, scheduled: Mapping[str, int]
    ) -> StepPlan:
        """Plan the step's proposals, of ``max_tokens`` by request id.

        Beside a request that reads its prompt nobody goes through level 2, whose passes would delay
        it, but seeded requests: they must not depend on arrivals.
        """
        if self.decisions is None:
            number, self._num_steps = self._num_steps, self._num_steps + 1
            proposing = {
                request_id: fixed_choice(self._config, length)
                for request_id, length in max_tokens.items()
            }
            return StepPlan(number, proposing, tuple(self._disabled))
        number, chosen = self.decisions.decide(
            list(max_tokens),
            lambda request_id: self._candidate(self.requests[request_id], max_tokens[request_id]),
            num_plain,
        )
        reads_prompts = bool(chosen) and any(
            (request := self.requests[request_id]).is_prefill_chunk
            or request.num_computed_tokens - count < request.num_prompt_tokens
            for request_id, count in scheduled.items()
        )
        proposing = {
            request_id: choice
            for request_id, choice in chosen.items()
            if choice.route != HIERARCHICAL
            or not reads_prompts
            or has_seed(self.requests[request_id])
        }
        return StepPlan(number, proposing, tuple(self._disabled))

    def _max_tokens(self, request) -> int:
        """Return the maximum tokens that a request may propose in the step just scheduled."""
        # The output with the first token is read after the next step was launched, so both
        # propose nothing. Only the request's own place decides.
        is_first = request.num_computed_tokens <= request.num_prompt_tokens + 1
        # ``num_computed_tokens`` is an upper bound: tokens in flight may be rejected.
        if (
            request.is_prefill_chunk
            or (is_first and self.decisions is not None)
            or request.request_id in self._disabled
            or request.num_computed_tokens < self._config.min_context
            # A draft model has no images, and nothing else may draft.
            or (request.mm_features and self._drafts_text_only)
        ):
            return 0
        max_tokens = proposal_limit(request.sampling_params, self.num_spec_tokens)
        if not has_seed(request):
            # This step and the next one each add at least one token beside the proposal. The
            # count of tokens left depends on when outputs arrive. A seeded request must not depend
            # on that, so only the device limits its proposals.
            max_tokens = min(max_tokens, self._limit(request) - request.num_tokens - 2)
        return max_tokens if max_tokens > 0 and self._has_slot(request.request_id) else 0

    def _has_slot(self, request_id: str) -> bool:
        """True if the request has a slot of the worker's, or gets a free one now."""
        if request_id not in self._with_slots and len(self._with_slots) < self._num_slots:
            self._with_slots.add(request_id)
        return request_id in self._with_slots

    def _candidate(self, request, max_tokens: int) -> Candidate:
        params = request.sampling_params
        return Candidate(
            request.request_id,
            request.num_computed_tokens,
            max_tokens,
            # Only the device knows the number of matches. A draft model has no images.
            {
                name: None if name == MODEL_SOURCE and request.mm_features else 0
                for name in self._sources
            },
            has_seed(request),
            is_greedy(params),
        )

    # After a step.

    def update_from_output(self, scheduler_output, model_runner_output):
        self._learn_from_report(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _learn_from_report(self, scheduler_output, model_runner_output) -> None:
        """Pass the outcomes and the time of a step to the controller."""
        plan, report = PLAN.of(scheduler_output), REPORT.of(model_runner_output) or StepReport(-1)
        self._disabled.update(report.disabled)
        if self.decisions is None or plan is None or not scheduler_output.num_scheduled_tokens:
            return
        if report.measured is not None:
            self.decisions.controller.start(CostModel(report.measured))
        if self.decisions.ignores_steps:
            self._last_ids = frozenset()  # the next step's time is not known
            return
        outcomes: dict[str, Outcome] = {}
        if report.number == plan.number - 1:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            outcomes = _outcomes(report, drafts, model_runner_output)
        time = self._step_time(scheduler_output, outcomes.values())
        self.decisions.on_step_end(plan.number, outcomes, report.seconds, time)

    def _step_time(self, scheduler_output, outcomes: Collection[Outcome]) -> StepTime | None:
        """Return the time of a step, whose output has just arrived.

        None if the step before had other requests, or one of this step's reads its prompt.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        cached = scheduler_output.scheduled_cached_reqs
        last_time, last_ids = self._last_time, self._last_ids
        self._last_time, self._last_ids = self.clock(), frozenset(scheduled)
        tokens = [scheduled[request_id] for request_id in cached.req_ids]
        decodes = [1 + len(drafts.get(request_id, ())) for request_id in cached.req_ids]
        alive = [request for request in map(self.requests.get, cached.req_ids) if request]
        is_same = last_ids == scheduled.keys() == set(cached.req_ids)
        if not is_same or tokens != decodes or len(alive) < len(tokens):
            return None
        return StepTime(
            all(is_greedy(request.sampling_params) for request in alive),
            tokens,
            cached.num_computed_tokens,
            self._last_time - last_time,
            sum(tokens) - len(tokens),
            num_accepted=sum(outcome.num_accepted for outcome in outcomes),
            num_verifying=sum(outcome.num_verified > 0 for outcome in outcomes),
        )


def _outcomes(report: StepReport, drafts, model_runner_output) -> dict[str, Outcome]:
    """Collect the outcomes of the proposals that a step verified, of drafts with padding."""
    indices, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
    outcomes = {}
    for request_id, proposal in report.proposed.items():
        if request_id in indices:
            num_verified = min(proposal.num_tokens, len(drafts.get(request_id, ())))
            num_accepted = min(num_verified, max(0, len(sampled[indices[request_id]]) - 1))
            outcomes[request_id] = Outcome(num_verified, num_accepted, proposal)
    return outcomes


class TriForceSchedulerV2(StepPlanMixin, PrefixCacheMixin, GrammarMaskMixin, Scheduler):
    """Synchronous scheduler: waits for each step's proposals and has them verified."""


class TriForceAsyncSchedulerV2(StepPlanMixin, GrammarMaskMixin, AsyncScheduler):
    """Asynchronous scheduler: each step verifies the planned number of tokens, with padding."""

    pads_drafts = True
