"""Reports to the scheduler: a step's proposed tokens, and their outcomes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.messages import REPORT, RequestReport, StepReport
from vllm_triforce.kernels.proposals import PAD_TOKEN


class Reports:
    """Reports of one worker, attached to its steps' outputs without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type != "cpu"
        self._number: int | None = None
        self._rows: list[tuple[list[str], torch.Tensor]] = []
        self._marks: list[tuple[str, Any, Any]] = []
        """Route, begin and end of the proposals by each route."""
        self._measured: Measurements | None = None
        self._disabled: tuple[str, ...] = ()
        self._pending: Callable[..., StepReport] | None = None

    def begin_step(self, number: int | None) -> None:
        """Begin a step with this plan; the previous report goes with this step's output."""
        if self._number is not None:
            parts = self._number, self._rows, self._marks, self._mark()
            self._pending = partial(self._make_report, *parts)
        self._number, self._rows, self._marks = number, [], []

    def add(self, request_ids: list[str], outcomes: torch.Tensor) -> None:
        """Add outcomes, [num_rows, len(OutcomeColumn)], int32, which may be overwritten later."""
        if self._number is not None:
            host_copy = torch.empty(outcomes.shape, dtype=outcomes.dtype, pin_memory=self._is_gpu)
            self._rows.append((request_ids, host_copy.copy_(outcomes, non_blocking=True)))

    @contextmanager
    def timing(self, route: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self.add_time(route, begin, self._mark())

    def add_time(self, route: str, begin, end) -> None:
        """Add the time of a route's proposals: events of a GPU, or seconds."""
        if self._number is not None:
            self._marks.append((route, begin, end))

    def _mark(self):
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def set_measurements(self, measurements: Measurements | None) -> None:
        self._measured = measurements

    def add_disabled(self, request_ids: list[str]) -> None:
        self._disabled += tuple(request_ids)

    def attach_to(self, output):
        """Attach the previous step's report, if any, to ``output`` and return ``output``."""
        # vLLM's empty output is one shared object: the report waits for the next output.
        if output is not None and getattr(output, "req_ids", True) and self._pending is not None:
            # A step without tokens has no output, and the report that it would carry is lost.
            # Measurements and disabled requests are therefore added here.
            REPORT.attach_later(output, partial(self._pending, self._measured, self._disabled))
            self._pending = self._measured = None
            self._disabled = ()
        return output

    @staticmethod
    def _make_report(number, rows, marks, end, measured, disabled) -> StepReport:
        if not isinstance(end, float):
            end.synchronize()  # returns at once: the step is over
        proposed = {
            request_id: RequestReport(*values)
            for request_ids, outcomes in rows
            for request_id, values in zip(request_ids, outcomes.tolist())
        }
        seconds = {
            # Without a device marks are seconds of the host's clock.
            route: end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
            for route, begin, end in marks
        }
        return StepReport(number, proposed, seconds, measured, disabled)


class ProposedTokensHandler(DraftTokensHandler):
    """Reports each request's proposed tokens to the scheduler.

    vLLM's handler reports ``num_speculative_tokens`` placeholders for every request. An
    asynchronous scheduler assumes the same number, and reads the tokens only for structured output.
    """

    def __init__(self, device: torch.device, is_asynchronous: bool) -> None:
        super().__init__(device)
        self._is_asynchronous = is_asynchronous
        self._proposal: tuple[torch.Tensor, torch.Tensor] | None = None
        self._max_tokens = 0
        self._device_tensors: tuple[torch.Tensor, ...] = ()
        self._host_arrays: tuple[np.ndarray, ...] | None = None

    def set_proposals(
        self,
        tokens: torch.Tensor,  # [num_reqs, num_speculative_tokens], int64
        lengths: torch.Tensor | None,  # [num_reqs], int32; None if nothing was proposed
    ) -> None:
        self._proposal = None if lengths is None else (tokens, lengths)
        self._max_tokens = tokens.shape[1]

    def set_draft_tokens(self, input_batch, draft_tokens) -> None:
        self.req_ids = input_batch.req_ids
        if self._host_arrays is not None:
            self.copy_event.synchronize()
        self._host_arrays = None
        if self._proposal is None:
            return
        if self._is_asynchronous and not input_batch.has_structured_output_reqs:
            return
        # Cloned and kept until they are copied: the next step overwrites vLLM's buffer.
        tokens, lengths = self._proposal
        self._device_tensors = tokens.clone(), lengths
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._host_arrays = tuple(async_copy_to_np(tensor) for tensor in self._device_tensors)
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds:
        num_reqs = len(self.req_ids)
        if self._host_arrays is None:
            tokens = [[PAD_TOKEN] * self._max_tokens for _ in range(num_reqs)]
            lengths = [0] * num_reqs
        else:
            self.copy_event.synchronize()
            tokens, lengths = (array.tolist() for array in self._host_arrays)
        if self._is_asynchronous:
            # The full pass verifies the padding too, so the grammar's masks must cover it.
            return DraftTokenIds(self.req_ids, tokens)
        return DraftTokenIds(self.req_ids, [row[:length] for row, length in zip(tokens, lengths)])
