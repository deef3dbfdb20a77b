"""Asynchronous scheduling for Model Runner V1: no drafts for requests that are too short."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_triforce.config.asked import METHOD
from vllm_triforce.scheduler.lookahead import LendsBlocks
from vllm_triforce.scheduler.outcomes import CountsOutcomes


class TriForceAsyncScheduler(LendsBlocks, CountsOutcomes, AsyncScheduler):
    """vLLM's asynchronous scheduler, which runs ahead of the worker and so cannot know what is
    proposed: it has ``num_speculative_tokens`` of every request verified. Below ``min_context``
    nothing is ever proposed, and there, off costs nothing."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._min_context = self.vllm_config.additional_config[METHOD]["min_context"]

    def _update_after_schedule(self, scheduler_output) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            # The worker's own test, on the same upper bound of what is computed.
            if request.spec_token_ids and request.num_computed_tokens < self._min_context:
                request.spec_token_ids = []
        drafts = {
            name: len(self.requests[name].spec_token_ids)
            for name in scheduler_output.num_scheduled_tokens
        }
        wanted = {name: count for name, count in drafts.items() if count}
        for name, count in self._lend(scheduler_output, wanted).items():
            request = self.requests[name]
            request.spec_token_ids = request.spec_token_ids[:count]
