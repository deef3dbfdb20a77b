"""What the requests of a step propose behind it, decided before the step begins.

On Model Runner V2 the host never waits for the device, and the scheduler may be some steps ahead of
both. So who speculates, by which route, and how much is decided where steps are made, and travels
with the step to every rank, which all do the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Proposing:
    """A request's part in a plan.

    Args:
        route: the levels that its proposal passes on its way to the full pass, as in
            ``controller/choice.py``.
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
    proposing: Mapping[str, Proposing]
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
