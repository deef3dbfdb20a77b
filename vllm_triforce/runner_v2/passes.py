"""LoRA in level 2's passes, as far as the device side sees it.

A model's pass over rows of a fixed number of tokens, as CUDA graphs.

Work on a proposal's rows that is launched as one CUDA graph: a round's passes, and what is
between them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import weak_ref_tensor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import SamplingV2
from vllm_triforce.runner_v2.graph_sizes import (
    MAX_ROWS,
    capture_stream,
    on_capture_stream,
    pass_sizes,
    round_sizes,
)
from vllm_triforce.runner_v2.sampling import kernel_scratch
from vllm_triforce.vllm_patches.kv_connector import hidden_kv_connector


class PassAdapters(Protocol):
    """The runner's side of it (``runner_v2/adapters.py``)."""

    @property
    def capture_cases(self) -> list[int]:
        """vLLM's numbers of active adapters: of each there are graphs."""
        ...

    def has_any(self, request_ids: Sequence[str]) -> bool:
        """Whether one of these requests has an adapter."""
        ...

    def begin_proposal(self, request_ids: Sequence[str], num_rows: int, query_len: int) -> None:
        """The passes to come are of these requests, a row each, padded to ``num_rows``."""
        ...

    def begin_capture(self, num_active: int, num_rows: int, query_len: int) -> None:
        """A pass of so many rows is captured next, with so many adapters."""
        ...


class PassGraphs(CudaGraphManager):
    """vLLM's manager, for uniform batches of the given numbers of rows.

    Args:
        sizes: in rows, the smallest first.
        above: batches of so many rows, or fewer, take none of them.
        adapters: None where the model has none; otherwise there are graphs without and with them.
    """

    def __init__(
        self,
        vllm_config,
        device,
        mode: CUDAGraphMode,
        query_len: int,
        sizes: Sequence[int],
        above: int = 0,
        adapters: PassAdapters | None = None,
    ):
        self._sizes = sizes
        self._above = above
        self._adapters = adapters
        cases = None if adapters is None else adapters.capture_cases
        super().__init__(vllm_config, device, mode, query_len, lora_capture_cases=cases)

    def _init_candidates(self) -> None:
        if not self.cudagraph_mode:
            return
        length = self.decode_query_len
        descs, smallest = [], self._above * length + 1
        for rows in self._sizes:
            for active in self.lora_capture_cases:
                desc = BatchExecutionDescriptor(
                    CUDAGraphMode.FULL, rows * length, rows, length, num_active_loras=active
                )
                descs.append(desc)
                for num_tokens in range(smallest, desc.num_tokens + 1):
                    self._candidates[num_tokens, active] = [desc]
            smallest = rows * length + 1
        # The largest first: its activations hold those of the others.
        self._capture_descs[CUDAGraphMode.FULL] = descs[::-1]

    def _capture_stream(self, desc) -> torch.cuda.Stream:
        return capture_stream(self.device)

    def capture_pass(self, forward: Callable[[int], None], description: str) -> None:
        """Captures ``forward(num_rows)`` for each size."""

        def create(desc, warmup: bool):
            if self._adapters is not None:
                length = desc.uniform_token_count
                self._adapters.begin_capture(desc.num_active_loras, desc.num_reqs, length)
            if warmup:
                run = partial(forward, desc.num_reqs)
                return lambda mode: on_capture_stream(self.device, run)
            return lambda mode: forward(desc.num_reqs)

        self.capture(create, progress_bar_desc=description)


class ModelPass:
    """Runs a model on buffers of its own.

    Args:
        num_seqs: sequences that the attention sees, for all rows.
        metadata: from a number of rows to the attention metadata by layer. Its tensors must be
            views of buffers that stay where they are, where the pass is to be captured.
        slots: likewise, to where each token's KV goes, by layer.
        adapters: None where the model has none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config,
        max_rows: int,
        query_len: int,
        num_seqs: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        metadata: Callable[[int], dict],
        slots: Callable[[int], dict[str, torch.Tensor]],
        name: str,
        adapters: PassAdapters | None = None,
    ) -> None:
        self.inputs = PassInputs(max_rows, query_len, num_seqs, device)
        self.max_rows = max_rows
        self.name = name
        self._adapters = adapters
        self._has_adapters = False
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._metadata = metadata
        self._slots = slots
        self._hidden = torch.zeros(max_rows * query_len, hidden_size, dtype=dtype, device=device)
        self._graphs: PassGraphs | None = None
        self._is_inlined = False

    @contextmanager
    def inlined(self) -> Iterator[None]:
        """While a graph is captured that has runs within it."""
        self._is_inlined = True
        try:
            yield
        finally:
            self._is_inlined = False

    def capture(self, mode: CUDAGraphMode, has_rounds: bool = True) -> None:
        """
        Args:
            has_rounds: the rounds of few rows are graphs of their own.
        """
        largest = self._vllm_config.compilation_config.max_cudagraph_capture_size or 0
        sizes = pass_sizes(self.max_rows, largest)
        if not has_rounds:
            sizes = round_sizes(self.max_rows, largest) + sizes
        if not sizes:
            return
        # What a capture's warm-up computes is written nowhere.
        self.inputs.slot_mapping.fill_(-1)
        graphs = PassGraphs(
            self._vllm_config,
            self._device,
            mode,
            self.inputs.query_len,
            sizes,
            MAX_ROWS * has_rounds,
            self._adapters,
        )
        graphs.capture_pass(self._forward, f"Capturing TriForce's {self.name}")
        self._graphs = graphs

    def begin(self, request_ids: Sequence[str]) -> None:
        """The runs to come are of these requests, a row each."""
        if self._adapters is not None:
            self._has_adapters = self._adapters.has_any(request_ids)
            num_rows = self.padded_rows(len(request_ids))
            self._adapters.begin_proposal(request_ids, num_rows, self.inputs.query_len)

    def padded_rows(self, num_rows: int) -> int:
        """Rows that a run with ``num_rows`` reads: fill that many."""
        if self._graphs is None or self._is_inlined:
            return num_rows
        return self._dispatch(num_rows).num_reqs

    def run(self, num_rows: int) -> torch.Tensor:  # [num_rows, query_len, hidden_size]
        """Hidden states behind the inputs, valid until the next run."""
        if self._graphs is not None and not self._is_inlined:
            desc = self._dispatch(num_rows)
            if desc.cg_mode == CUDAGraphMode.FULL:
                self._graphs.run_fullgraph(desc)
                return self._result(num_rows)
        self._forward(num_rows)
        return self._result(num_rows)

    def _dispatch(self, num_rows: int):
        length = self.inputs.query_len
        # With how many there are graphs vLLM's manager knows.
        num_active = int(self._has_adapters)
        return self._graphs.dispatch(num_rows, num_rows * length, length, num_active)

    def _result(self, num_rows: int) -> torch.Tensor:
        length = self.inputs.query_len
        return self._hidden[: num_rows * length].unflatten(0, (num_rows, length))

    def _forward(self, num_rows: int) -> None:
        num_tokens = num_rows * self.inputs.query_len
        hidden = forward(
            self._model,
            self._vllm_config,
            self.inputs.token_ids[:num_tokens],
            self.inputs.positions[:num_tokens],
            self._metadata(num_rows),
            self._slots(num_rows),
        )
        self._hidden[:num_tokens].copy_(hidden)


def forward(
    model: torch.nn.Module,
    vllm_config,
    token_ids: torch.Tensor,  # [num_tokens], int32
    positions: torch.Tensor,  # [num_tokens], int64
    metadata: dict | None,
    slot_mapping: dict[str, torch.Tensor],
) -> torch.Tensor:  # [num_tokens, hidden_size]
    context = set_forward_context(
        metadata, vllm_config, num_tokens=len(token_ids), slot_mapping=slot_mapping
    )
    with hidden_kv_connector(), context:
        hidden = model(input_ids=token_ids, positions=positions)
    return hidden[0] if isinstance(hidden, tuple) else hidden


class GraphedRound:
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
        sampling: SamplingV2,
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

    def __call__(self, sampling: SamplingV2, *args) -> tuple[torch.Tensor, ...]:
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
            stack.enter_context(self._rows.with_num_rows(num_rows))
            # Weak, so that graphs of other sizes have the same memory.
            results = self._work(self._sampling)
            self._results[num_rows] = tuple(weak_ref_tensor(its) for its in results)
