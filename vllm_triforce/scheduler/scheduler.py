"""vLLM's scheduler for Model Runner V1: invents no drafts, and gets them with a step's output."""

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.scheduler.draft_carrier import TakesDrafts
from vllm_triforce.scheduler.placeholders import drop_placeholders


class TriForceScheduler(TakesDrafts, Scheduler):
    """Has drafts verified that were proposed, and no placeholders."""

    def _update_after_schedule(self, scheduler_output) -> None:
        drop_placeholders(scheduler_output)
        super()._update_after_schedule(scheduler_output)
