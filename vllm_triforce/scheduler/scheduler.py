"""vLLM's scheduler for Model Runner V1: invents no drafts, and gets them with a step's output."""

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.scheduler.accepted_blocks import CachesAcceptedBlocks
from vllm_triforce.scheduler.draft_carrier import TakesDrafts
from vllm_triforce.scheduler.placeholders import drop_placeholders


class TriForceScheduler(TakesDrafts, CachesAcceptedBlocks, Scheduler):
    """Has drafts verified that were proposed, and no placeholders."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.dynamic_sd_lookup is None:
            # By size of the batch, how much is proposed at most: with such a schedule vLLM pads
            # nothing. Padded, a request may not fit into a step's budget, and wait for ever.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def _update_after_schedule(self, scheduler_output) -> None:
        # None are expected; a newer vLLM may have other reasons to make some.
        drop_placeholders(scheduler_output)
        super()._update_after_schedule(scheduler_output)
