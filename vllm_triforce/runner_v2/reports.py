"""Collect reports of each step's proposals, without waiting for the device."""

from collections.abc import Callable
from functools import partial

import torch

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.plan import RequestReport, StepReport, attach_report


class Reports:
    """Reports of one worker, attached to the outputs of its steps."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type != "cpu"
        self._number: int | None = None
        self._rows: list[tuple[list[str], torch.Tensor]] = []
        self._measured: Measurements | None = None
        self._disabled: tuple[str, ...] = ()
        self._pending: Callable[..., StepReport] | None = None

    def begin_step(self, number: int | None) -> None:
        """Begin a step; the previous step's report goes with this step's output.

        Args:
            number: number of the step's plan; None without a plan.
        """
        if self._number is not None:
            self._pending = partial(self._make_report, self._number, self._rows, self._event())
        self._number, self._rows = number, []

    def add(self, request_ids: list[str], outcomes: torch.Tensor) -> None:
        """Add the outcomes of a batch's proposals to the step's report.

        Args:
            outcomes: [num_rows, len(OutcomeColumn)], int32; may be overwritten afterwards.
        """
        if self._number is not None:
            host_copy = torch.empty(outcomes.shape, dtype=outcomes.dtype, pin_memory=self._is_gpu)
            self._rows.append((request_ids, host_copy.copy_(outcomes, non_blocking=True)))

    def set_measurements(self, measurements: Measurements | None) -> None:
        """Send measurements with the next report."""
        self._measured = measurements

    def add_disabled(self, request_ids: list[str]) -> None:
        """Send ids of disabled requests with the next report."""
        self._disabled += tuple(request_ids)

    def attach_to(self, output):
        """Attach the previous step's report, if any, to ``output`` and return ``output``."""
        # vLLM's empty output is one shared object: the report waits for the next output.
        if output is not None and getattr(output, "req_ids", True) and self._pending is not None:
            # A step without tokens has no output, and the report that it would carry is lost.
            # Measurements and disabled requests are therefore added here.
            attach_report(output, partial(self._pending, self._measured, self._disabled))
            self._pending = self._measured = None
            self._disabled = ()
        return output

    def _event(self):
        if not self._is_gpu or not self._rows:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @staticmethod
    def _make_report(number, rows, event, measured, disabled) -> StepReport:
        if event is not None:
            event.synchronize()  # returns at once: the step is over
        proposed = {
            request_id: RequestReport(*values)
            for request_ids, outcomes in rows
            for request_id, values in zip(request_ids, outcomes.tolist())
        }
        return StepReport(number, proposed, measured, disabled)
