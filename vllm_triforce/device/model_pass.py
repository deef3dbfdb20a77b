"""A model's pass over rows of a fixed number of tokens, as CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_triforce.device.adapters import PassAdapters
from vllm_triforce.device.graph_sizes import (
    MAX_ROWS,
    capture_stream,
    on_capture_stream,
    pass_sizes,
    round_sizes,
)
from vllm_triforce.kernels.feeding import PassInputs
from vllm_triforce.vllm_patches.kv_connector import hidden_kv_connector


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
