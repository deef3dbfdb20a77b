"""Messages between scheduler and workers, as attributes of vLLM's own.

With ``SchedulerOutput``, which goes to every rank as it is:

- a step's plan: on Model Runner V2 the scheduler may be some steps ahead of the device, and the
  host never waits for it. So proposals are planned when their step is made;
- the number of blocks that requests keep, where the scheduler took back blocks that it had lent;
- on Model Runner V1, the ``cache_salt`` of new requests, which keeps tenants apart.

With ``ModelRunnerOutput``:

- the report of a plan, read from the device one step later;
- on Model Runner V1, the step's drafts.

Counters travel with ``ModelRunnerOutput`` too, and on to the API server
(``vllm_patches/carrier.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_triforce.controller.async_controller import RequestReport
from vllm_triforce.controller.routes import Choice
from vllm_triforce.vllm_patches.carrier import Message


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step."""

    number: int  # of the step, counted by the scheduler
    proposing: Mapping[str, Choice]  # by request id; other requests propose nothing
    disabled: tuple[str, ...] = ()
    """Requests that are no longer speculated on. Every rank releases their slots."""


@dataclass
class StepReport:
    """Results of one step's plan."""

    number: int  # of the plan
    proposed: Mapping[str, RequestReport] = field(default_factory=dict)
    """By request id; requests that proposed nothing may be missing."""
    seconds: Mapping[str, float] = field(default_factory=dict)  # on the device, by route
    measured: Any = None  # ``Measurements`` of the passes, sent once
    disabled: tuple[str, ...] = ()
    """Requests newly disabled because of NaN logits, in this step or an earlier one."""


class StepDrafts(NamedTuple):
    """Drafts of a step on Model Runner V1."""

    drafts: Any
    """vLLM's ``DraftTokenIds``, None if there are none."""
    expects_proposals: bool
    """True if the worker may propose in the next step."""


# Attributes of vLLM's SchedulerOutput.
PLAN = Message[StepPlan]("triforce_plan")
BLOCKS_KEPT = Message[Mapping[str, tuple[int, ...]]]("triforce_blocks_kept")
"""By KV cache group, of requests that gave blocks back."""
TENANTS = Message[Mapping[str, str]]("triforce_tenants")
"""Of new requests, "" without a salt."""
# Attributes of vLLM's ModelRunnerOutput.
REPORT = Message[StepReport]("triforce_report")
DRAFTS = Message[StepDrafts]("triforce_drafts")
