"""What came of a step's plan, on its way back to the scheduler.

It is known on the device when the step is over, and goes with the output of the step after, by
which the device is done with it: nobody waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Attribute of a ModelRunnerOutput.
_REPORT_ATTRIBUTE = "triforce_report"


@dataclass(frozen=True)
class Proposed:
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
    proposed: Mapping[str, Proposed] = field(default_factory=dict)
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
