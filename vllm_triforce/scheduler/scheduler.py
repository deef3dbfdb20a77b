"""vLLM's scheduler for Model Runner V1: invents no drafts, and gets them with a step's output."""

from collections.abc import Collection

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.config.asked import METHOD
from vllm_triforce.core.eligibility import decodes_plainly, seed_of_draws
from vllm_triforce.scheduler.accepted_blocks import CachesAcceptedBlocks
from vllm_triforce.scheduler.draft_carrier import TakesDrafts
from vllm_triforce.scheduler.grammar_masks import SizesGrammarMasks
from vllm_triforce.scheduler.lookahead import LendsBlocks
from vllm_triforce.scheduler.outcomes import CountsOutcomes
from vllm_triforce.scheduler.placeholders import drop_placeholders


class TriForceScheduler(
    LendsBlocks, TakesDrafts, CachesAcceptedBlocks, CountsOutcomes, SizesGrammarMasks, Scheduler
):
    """Has drafts verified that were proposed, and no placeholders."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._min_context = self.vllm_config.additional_config[METHOD]["min_context"]

    def _update_after_schedule(self, scheduler_output) -> None:
        # None are expected; a newer vLLM may have other reasons to make some.
        drop_placeholders(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        names = scheduler_output.num_scheduled_tokens
        came_back = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._lend(
            scheduler_output,
            {name: self.num_spec_tokens for name in names if self._may_propose(name, came_back)},
        )

    def _may_propose(self, name: str, came_back: Collection[str]) -> bool:
        """The worker chooses behind the step; which steps it chooses in it has said before, of the
        batch as it was then. A request with a seed waits for no such step."""
        request = self.requests[name]
        return (
            (
                self.expects_proposals
                or not request.num_output_tokens
                or name in came_back
                or seed_of_draws(request.sampling_params) is not None
            )
            and not request.is_prefill_chunk
            and request.num_computed_tokens >= self._min_context
            and not decodes_plainly(request.sampling_params)
        )
