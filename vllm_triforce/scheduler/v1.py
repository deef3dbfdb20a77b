"""Scheduler for Model Runner V1: drafts arrive with the step's output, without placeholders.

With speculation configured, vLLM's engine core fetches drafts from the worker after every step
(``EngineCore.post_step`` in vllm/v1/engine/core.py), even if the step made none. If the worker is
another process, as in every server on the CPU, that costs a round trip per step. Model Runner V1
has finished its drafts when it returns its output, so they are attached to it.
"""

from collections.abc import Collection

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.config import read_config
from vllm_triforce.core.limits import decodes_plainly
from vllm_triforce.core.messages import DRAFTS, TENANTS
from vllm_triforce.scheduler.grammar_masks import GrammarMaskMixin
from vllm_triforce.scheduler.lookahead import LookaheadMixin, PrefixCacheMixin, has_seed
from vllm_triforce.scheduler.stats import StatsMixin


class TriForceScheduler(LookaheadMixin, PrefixCacheMixin, StatsMixin, GrammarMaskMixin, Scheduler):
    """vLLM's scheduler without placeholder drafts, for Model Runner V1."""

    has_drafts_of_step = False
    """True if the step's output brought its drafts, or brought that there are none."""
    expects_proposals = True
    """True if the worker may propose in the next step."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._min_context = read_config(self.vllm_config)[0].min_context

    def _update_after_schedule(self, scheduler_output) -> None:
        super()._update_after_schedule(scheduler_output)
        if new_ids := [request.req_id for request in scheduler_output.scheduled_new_reqs]:
            salts = {i: self.requests[i].cache_salt or "" for i in new_ids}
            TENANTS.attach(scheduler_output, salts)
        request_ids = scheduler_output.num_scheduled_tokens
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        proposing = [
            request_id for request_id in request_ids if self._may_propose(request_id, resumed)
        ]
        if not proposing:
            return
        needs = self._next_needs()
        shares = self._share_tokens(dict.fromkeys(proposing, self.num_spec_tokens), needs)
        self._lend(scheduler_output, shares, needs)
        # vLLM has one limit for all requests of a step.
        scheduler_output.num_spec_tokens_to_schedule = min(
            scheduler_output.num_spec_tokens_to_schedule, max(shares.values())
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        message = DRAFTS.of(model_runner_output)
        self.has_drafts_of_step = message is not None
        if message is not None:
            self.expects_proposals = message.expects_proposals
            # As the engine core would after the step.
            if message.drafts is not None:
                self.update_draft_token_ids(message.drafts)
        return outputs

    def _may_propose(self, request_id: str, resumed: Collection[str]) -> bool:
        """True if the worker may propose for the request in this step.

        The worker chooses after the step. Its last output says if it expects to propose for the
        batch of that time. New, resumed and seeded requests may propose regardless.
        """
        request = self.requests[request_id]
        return (
            (
                self.expects_proposals
                or not request.num_output_tokens
                or request_id in resumed
                or has_seed(request)
            )
            and not request.is_prefill_chunk
            and request.num_computed_tokens >= self._min_context
            and not decodes_plainly(request.sampling_params)
        )
