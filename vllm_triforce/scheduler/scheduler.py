"""vLLM's scheduler for Model Runner V1: it invents no drafts."""

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.scheduler.placeholders import drop_placeholders


class TriForceScheduler(Scheduler):
    """Has drafts verified that were proposed, and no placeholders."""

    def _update_after_schedule(self, scheduler_output) -> None:
        drop_placeholders(scheduler_output)
        super()._update_after_schedule(scheduler_output)
