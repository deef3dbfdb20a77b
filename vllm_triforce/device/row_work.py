"""Work on a proposal's rows that is launched as one CUDA graph: a round's passes, and what is
between them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_triforce.device.model_pass import ModelPass, PassGraphs
from vllm_triforce.kernels.rows import Rows

Result = TypeVar("Result")

# Larger batches launch pass by pass: graphs keep their memory, and it is long passes that they are
# made of.
MAX_LOGITS_BYTES = 64 << 20


class RowWork(Generic[Result]):
    """Calls ``work()``, or replays it where it was captured for as many rows or more.

    Rows past ``rows.num_rows`` then take part. Kernels see by ``rows.count`` that there are fewer,
    or find nothing to do in them.

    Args:
        work: launches, for the first ``rows.num_rows`` rows; reads and writes nothing but tensors
            that stay where they are, and its own. What it returns is valid until the next replay
            of any graph.
        passes: that it runs.
        logits_shape: [places of a row, vocab_size], of the largest logits that it makes.
    """

    def __init__(
        self,
        work: Callable[[], Result],
        rows: Rows,
        passes: Sequence[ModelPass],
        logits_shape: tuple[int, int],
        vllm_config,
        device: torch.device,
        name: str,
    ) -> None:
        self._work = work
        self._rows = rows
        self._passes = passes
        self._max_rows = min(
            rows.max_rows, MAX_LOGITS_BYTES // (4 * logits_shape[0] * logits_shape[1])
        )
        self._vllm_config = vllm_config
        self._device = device
        self.name = name
        self._graphs: PassGraphs | None = None
        self._results: dict[int, Result] = {}

    def capture(self, mode: CUDAGraphMode) -> None:
        if self._max_rows < 1:
            return
        graphs = PassGraphs(self._vllm_config, self._device, mode, 1, self._max_rows)
        graphs.capture_pass(self._capture, f"Capturing TriForce's {self.name}")
        self._graphs = graphs

    def __call__(self) -> Result:
        num_rows = self._rows.num_rows
        if self._graphs is not None:
            desc = self._graphs.dispatch(num_rows, num_rows, 1, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                return self._replay(desc)
        return self._work()

    def _replay(self, desc) -> Result:
        assert self._graphs is not None
        self._graphs.run_fullgraph(desc)
        return self._results[desc.num_reqs]

    def _capture(self, num_rows: int) -> None:
        with ExitStack() as stack:
            for its in self._passes:
                stack.enter_context(its.inlined())
            stack.enter_context(self._rows.as_if(num_rows))
            self._results[num_rows] = self._work()
