"""Collects what comes of each step's plan, without a wait for the device."""

from collections.abc import Callable
from functools import partial

import torch

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.plan import RequestReport, StepReport, attach_report


class Reports:
    """One worker's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number: int | None = None
        self._rows: list[tuple[list[str], torch.Tensor]] = []
        self._measured: Measurements | None = None
        self._disabled: tuple[str, ...] = ()
        self._ready: Callable[..., StepReport] | None = None

    def begin_step(self, number: int | None) -> None:
        """A step begins; what was collected of the one before goes with its output.

        Args:
            number: of its plan; None where it has none.
        """
        if self._number is not None:
            self._ready = partial(self._make, self._number, self._rows, self._event())
        self._number, self._rows = number, []

    def add(self, request_ids: list[str], outcomes: torch.Tensor) -> None:
        """
        Args:
            outcomes: [num_rows, len(OutcomeColumn)], int32; may be written over after this.
        """
        if self._number is not None:
            copied = torch.empty(outcomes.shape, dtype=outcomes.dtype, pin_memory=self._is_gpu)
            self._rows.append((request_ids, copied.copy_(outcomes, non_blocking=True)))

    def set_measurements(self, measurements: Measurements | None) -> None:
        """What passes take goes with the next report."""
        self._measured = measurements

    def add_disabled(self, request_ids: list[str]) -> None:
        """That these are not speculated on again goes with the next report."""
        self._disabled += tuple(request_ids)

    def attach_to(self, output):
        """``output`` with what is ready."""
        # vLLM's empty output is one object for all: what is ready can wait.
        if output is not None and getattr(output, "req_ids", True) and self._ready is not None:
            # A step without tokens has no output, and what it would have taken along is lost: what
            # was measured, and who is disabled, must not be.
            attach_report(output, partial(self._ready, self._measured, self._disabled))
            self._ready = self._measured = None
            self._disabled = ()
        return output

    @property
    def _is_gpu(self) -> bool:
        return self._device.type != "cpu"

    def _event(self):
        if not self._is_gpu or not self._rows:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @staticmethod
    def _make(number, rows, event, measured, disabled) -> StepReport:
        if event is not None:
            event.synchronize()  # of a step that is over: it waits for nothing
        proposed = {
            name: RequestReport(*values)
            for names, outcomes in rows
            for name, values in zip(names, outcomes.tolist())
        }
        return StepReport(number, proposed, measured, disabled)
