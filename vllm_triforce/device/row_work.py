"""Work on a proposal's rows that is launched as one CUDA graph: a round's passes, and what is
between them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import weak_ref_tensor

from vllm_triforce.device.batch import DeviceSampling
from vllm_triforce.device.graph_sizes import round_sizes
from vllm_triforce.device.model_pass import ModelPass, PassGraphs
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.verification.masked_logits import kernel_scratch


class RowWork:
    """Calls ``work(sampling)``, or replays it where it was captured for as many rows or more.

    Rows past ``rows.num_rows`` then take part. Kernels see by ``rows.count`` that there are fewer,
    or find nothing to do in them.

    Args:
        work: launches, for the first ``rows.num_rows`` rows; reads and writes nothing but tensors
            that stay where they are, and its own. What it returns, of a replay, is in memory that
            the next replay of any graph may write.
        sampling: with which it is captured. It may do more than the rows of a replay ask for.
        passes: that it runs.
    """

    def __init__(
        self,
        work: Callable[..., tuple[torch.Tensor, ...]],
        sampling: DeviceSampling,
        rows: Rows,
        passes: Sequence[ModelPass],
        vllm_config,
        device: torch.device,
        name: str,
    ) -> None:
        self._work = work
        self._sampling = sampling
        self._rows = rows
        self._passes = passes
        self._vllm_config = vllm_config
        self._device = device
        self.name = name
        self._graphs: PassGraphs | None = None
        self._results: dict[int, tuple[torch.Tensor, ...]] = {}
        self._scratch: list[torch.Tensor] = []

    def capture(self, mode: CUDAGraphMode) -> None:
        largest = self._vllm_config.compilation_config.max_cudagraph_capture_size or 0
        if not largest:
            return
        sizes = round_sizes(self._rows.max_rows, largest)
        graphs = PassGraphs(self._vllm_config, self._device, mode, 1, sizes)
        # What is launched in a capture's warm-up finds no row to write anything for.
        self._rows.count.zero_()
        graphs.capture_pass(self._capture, f"Capturing TriForce's {self.name}")
        self._graphs = graphs
        self._scratch = kernel_scratch()  # it lives as long as the graphs that write to it

    def __call__(self, sampling: DeviceSampling, *args) -> tuple[torch.Tensor, ...]:
        """
        Args:
            args: of ``work``, of which a graph needs none.
        """
        num_rows = self._rows.num_rows
        if self._graphs is not None:
            desc = self._graphs.dispatch(num_rows, num_rows, 1, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                return self._replay(desc)
        return self._work(sampling, *args)

    def _replay(self, desc) -> tuple[torch.Tensor, ...]:
        assert self._graphs is not None
        self._graphs.run_fullgraph(desc)
        return self._results[desc.num_reqs]

    def _capture(self, num_rows: int) -> None:
        with ExitStack() as stack:
            for its in self._passes:
                stack.enter_context(its.inlined())
            stack.enter_context(self._rows.as_if(num_rows))
            # Weak, so that graphs of other sizes have the same memory.
            results = self._work(self._sampling)
            self._results[num_rows] = tuple(weak_ref_tensor(its) for its in results)
