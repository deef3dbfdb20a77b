"""Plans and reports: what a step's requests propose, and the results of their proposals.

On Model Runner V2 the scheduler may be some steps ahead of the device, and the host never waits for
it. The scheduler therefore plans a step's proposals when it makes the step. The plan travels to
every rank with vLLM's ``SchedulerOutput``. The report of a step is read from the device one step
later and returns with that step's ``ModelRunnerOutput``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import ROUND_PRIOR
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.metrics.carrier import set_on_result

# Attribute of vLLM's SchedulerOutput, which goes to the workers as it is.
_PLAN_ATTRIBUTE = "triforce_plan"
# Attribute of vLLM's ModelRunnerOutput.
_REPORT_ATTRIBUTE = "triforce_report"


@dataclass(frozen=True)
class RequestPlan:
    """A request's proposal, as planned.

    Args:
        route: levels that the proposal passes (``controller/routes.py``).
        num_tokens: maximum length of the proposal.
        num_rounds: maximum number of rounds of level 1. With level 2 each round adds at least one
            token. A proposal that is still shorter after the last round is verified as it is.
    """

    route: str
    num_tokens: int
    num_rounds: int


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step.

    Args:
        number: number of the step, counted by the scheduler.
        proposing: plans by request id; other requests propose nothing.
        disabled: requests that are no longer speculated on. Every rank releases their slots.
    """

    number: int
    proposing: Mapping[str, RequestPlan]
    disabled: tuple[str, ...] = ()

    @property
    def routes(self) -> set[str]:
        """Routes of the step's proposals."""
        return {plan.route for plan in self.proposing.values()}


def attach_plan(scheduler_output, plan: StepPlan) -> None:
    """Attach a plan to a step."""
    setattr(scheduler_output, _PLAN_ATTRIBUTE, plan)


def plan_of(scheduler_output) -> StepPlan | None:
    """Return the plan attached to a step, None if there is none."""
    return getattr(scheduler_output, _PLAN_ATTRIBUTE, None)


def fixed_plan(config: ResolvedConfig, max_tokens: int) -> RequestPlan:
    """Plan a request's proposal by the configuration alone.

    Args:
        max_tokens: maximum length of the proposal, at least 1.
    """
    if config.levels == "1,3":
        return RequestPlan(config.sources[0], max_tokens, -(-max_tokens // config.gamma))
    per_round = 1 if config.levels == "2,3" else int(ROUND_PRIOR)
    return RequestPlan(HIERARCHICAL, max_tokens, -(-max_tokens // per_round))


@dataclass(frozen=True)
class RequestReport:
    """Result of a request's proposal."""

    num_tokens: int
    num_rounds: int
    """Rounds of levels 1 and 2 in which the request took part."""
    level1_accepted: int
    """Number of level 1's tokens that level 2 accepted."""
    level1_rejected: int
    """Number of rounds in which level 2 rejected a token."""


@dataclass
class StepReport:
    """Results of one step's plan.

    Args:
        number: number of the plan.
        proposed: reports by request id; requests that proposed nothing may be missing.
        measured: ``Measurements`` of the passes, sent once.
        disabled: requests newly disabled because of NaN logits, in this step or an earlier one.
    """

    number: int
    proposed: Mapping[str, RequestReport] = field(default_factory=dict)
    measured: Any = None
    disabled: tuple[str, ...] = ()


def attach_report(output, make_report) -> None:
    """Attach a report to a step's output.

    Args:
        output: vLLM's output, maybe asynchronous.
        make_report: returns the report. For an asynchronous output it is called by
            ``get_output()``, when the device has finished the step.
    """
    set_on_result(output, _REPORT_ATTRIBUTE, make_report)


def report_of(output) -> StepReport | None:
    """Return the report attached to an output, None if there is none."""
    return getattr(output, _REPORT_ATTRIBUTE, None)
