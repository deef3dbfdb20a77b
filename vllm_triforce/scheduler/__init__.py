"""Subclasses of vLLM's schedulers: plans, lent KV blocks, and speculation metrics."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as SchedulerBase
else:
    # Bases of mixins have to come after them, so only type checkers see vLLM's scheduler here.
    SchedulerBase = object
