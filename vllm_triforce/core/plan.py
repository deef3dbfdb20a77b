"""What the requests of a step propose behind it, decided before the step begins.

On Model Runner V2 the host never waits for the device, and the scheduler may be some steps ahead of
both. So who speculates, by which route, and how much is decided where steps are made, and travels
with the step to every rank, which all do the same.

What came of a step's plan, on its way back to the scheduler.

It is known on the device when the step is over, and goes with the output of the step after, by
which the device is done with it: nobody waits.

What requests propose where nothing chooses it: always the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import ROUND_PRIOR
from vllm_triforce.controller.routes import LEVELS


@dataclass(frozen=True)
class RequestPlan:
    """A request's part in a plan.

    Args:
        route: the levels that its proposal passes on its way to the full pass, as in
            ``controller/routes.py``.
        num_tokens: of its proposal, at most.
        num_rounds: in which level 1 drafts for it, at most. With level 2 each adds a token at
            least. A proposal that is shorter behind the last is handed up as it is.
    """

    route: str
    num_tokens: int
    num_rounds: int


@dataclass(frozen=True)
class StepPlan:
    """
    Args:
        number: of the step, as the scheduler counts.
        proposing: by request; those that are not in it propose nothing.
        disabled: requests that are not speculated on again: every rank releases their slots now.
    """

    number: int
    proposing: Mapping[str, RequestPlan]
    disabled: tuple[str, ...] = ()

    @property
    def routes(self) -> set[str]:
        return {its.route for its in self.proposing.values()}


# Attribute of vLLM's SchedulerOutput, which goes to the workers as it is.
_PLAN_ATTRIBUTE = "triforce_plan"


def attach_plan(scheduler_output, plan: StepPlan) -> None:
    """Sends a plan along with a step."""
    setattr(scheduler_output, _PLAN_ATTRIBUTE, plan)


def plan_of(scheduler_output) -> StepPlan | None:
    """The step's plan; None where the scheduler makes none."""
    return getattr(scheduler_output, _PLAN_ATTRIBUTE, None)


# Attribute of a ModelRunnerOutput.
_REPORT_ATTRIBUTE = "triforce_report"


@dataclass(frozen=True)
class RequestReport:
    """A request's proposal."""

    num_tokens: int
    num_rounds: int
    """Of levels 1 and 2 in which it took part."""
    level1_accepted: int
    """Tokens."""
    level1_rejected: int
    """Rounds in which level 2 rejected a token."""


@dataclass
class StepReport:
    """
    Args:
        number: the plan's.
        proposed: by request; those that proposed nothing may be left out.
        measured: what passes take (``controller/measurements.py``), once, when it is known.
        disabled: requests of which it became known that they are not speculated on again, of
            whatever step.
    """

    number: int
    proposed: Mapping[str, RequestReport] = field(default_factory=dict)
    measured: Any = None
    disabled: tuple[str, ...] = ()


def attach_report(output, make_report) -> None:
    """Sends a report along with a step's output.

    Args:
        output: vLLM's, maybe asynchronous.
        make_report: gives the report; called when the output is asked for.
    """
    if not hasattr(output, "get_output"):
        setattr(output, _REPORT_ATTRIBUTE, make_report())
        return
    get_output = output.get_output

    def get_output_with_report():
        result = get_output()
        setattr(result, _REPORT_ATTRIBUTE, make_report())
        return result

    output.get_output = get_output_with_report


def report_of(output) -> StepReport | None:
    """The report that came with an output; None where there is none."""
    return getattr(output, _REPORT_ATTRIBUTE, None)


def fixed_plan(config: ResolvedConfig, most: int) -> RequestPlan:
    """By the configuration alone.

    Args:
        most: tokens of the proposal at most, above 0.
    """
    if config.levels == "1,3":
        return RequestPlan(config.sources[0], most, -(-most // config.gamma))
    per_round = 1 if config.levels == "2,3" else int(ROUND_PRIOR)
    return RequestPlan(LEVELS, most, -(-most // per_round))
