"""Passes of the models and rounds of a proposal, as CUDA graphs over rows of a fixed shape."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import weak_ref_tensor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_triforce.core.model_pass import forward, target_inputs
from vllm_triforce.core.models import states_read
from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.runner_v2.adapters import LevelAdapters
from vllm_triforce.runner_v2.batch import ProposalContext
from vllm_triforce.runner_v2.graph_sizes import (
    MAX_ROWS,
    capture_stream,
    on_capture_stream,
    pass_sizes,
    round_sizes,
)
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING, SamplingV2, kernel_scratch


class PassGraphs(CudaGraphManager):
    """vLLM's manager, for uniform batches of the given numbers of rows.

    Args:
        sizes: numbers of rows, in ascending order.
        above: batches of at most this many rows use no graph.
        adapters: None without LoRA; otherwise each size is captured without and with adapters.
    """

    def __init__(
        self,
        vllm_config,
        device,
        mode: CUDAGraphMode,
        query_len: int,
        sizes: Sequence[int],
        above: int = 0,
        adapters: LevelAdapters | None = None,
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
        descs, min_tokens = [], self._above * length + 1
        for rows in self._sizes:
            for active in self.lora_capture_cases:
                desc = BatchExecutionDescriptor(
                    CUDAGraphMode.FULL, rows * length, rows, length, num_active_loras=active
                )
                descs.append(desc)
                for num_tokens in range(min_tokens, desc.num_tokens + 1):
                    self._candidates[num_tokens, active] = [desc]
            min_tokens = rows * length + 1
        # In descending order: smaller graphs share the memory of the largest activations.
        self._capture_descs[CUDAGraphMode.FULL] = descs[::-1]

    def _capture_stream(self, desc) -> torch.cuda.Stream:
        return capture_stream(self.device)

    def capture_pass(self, forward: Callable[[int], None], description: str) -> None:
        """Capture ``forward(num_rows)`` for each size."""

        def create(desc, warmup: bool):
            if self._adapters is not None:
                length = desc.uniform_token_count
                self._adapters.begin_capture(desc.num_active_loras, desc.num_reqs, length)
            run = partial(forward, desc.num_reqs)
            return lambda mode: on_capture_stream(self.device, run) if warmup else run()

        self.capture(create, progress_bar_desc=description)


class ModelPass:
    """Runs a model on static buffers, as a CUDA graph where one was captured.

    Args:
        inputs: input buffers; the length of ``inputs.seq_lens`` is the number of sequences that
            the attention sees.
        model_config: vLLM's configuration of ``model``.
        metadata: from a number of rows to attention metadata by layer. Tensors must be views of
            buffers with fixed addresses if the pass is captured.
        slots: from a number of rows to slot mappings by layer, under the same condition.
        adapters: None without LoRA.
        num_states: states of each token that are kept: those of the target that a head reads, or
            those that a head feeds back. One may be the model's output.
        is_target: True for the target, or its copy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config,
        inputs: PassInputs,
        model_config,
        metadata: Callable[[int], dict],
        slots: Callable[[int], dict[str, torch.Tensor]],
        name: str,
        adapters: LevelAdapters | None = None,
        num_states: int = 0,
        is_target: bool = False,
    ) -> None:
        self.inputs = inputs
        self._is_target = is_target
        self.max_rows = len(inputs.token_ids) // inputs.query_len
        self.name = name
        self._adapters = adapters
        self._has_adapters = False
        self.model = model
        self._vllm_config = vllm_config
        self._device = inputs.token_ids.device
        self._metadata = metadata
        self._slots = slots
        shape = len(inputs.token_ids), model_config.get_hidden_size()
        self._hidden, *self.states = (
            torch.zeros(shape, dtype=model_config.dtype, device=self._device)
            for _ in range(1 + num_states)
        )
        self._graphs: PassGraphs | None = None

    @contextmanager
    def within_capture(self) -> Iterator[None]:
        """Run without graphs while a larger one is captured."""
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    def capture(self, mode: CUDAGraphMode, has_round_graphs: bool = True) -> None:
        """Capture the pass for the numbers of rows that need it.

        Args:
            has_round_graphs: True if rounds of few rows are captured as a whole (``GraphedRound``),
                so that only larger passes need graphs.
        """
        limit = self._vllm_config.compilation_config.max_cudagraph_capture_size or 0
        sizes = pass_sizes(self.max_rows, limit)
        if not has_round_graphs:
            sizes = round_sizes(self.max_rows, limit) + sizes
        if not sizes:
            return
        # -1: the warm-up before the capture writes no KV.
        self.inputs.slot_mapping.fill_(-1)
        graphs = PassGraphs(
            self._vllm_config,
            self._device,
            mode,
            self.inputs.query_len,
            sizes,
            MAX_ROWS * has_round_graphs,
            self._adapters,
        )
        graphs.capture_pass(self._forward, f"Capturing TriForce's {self.name}")
        self._graphs = graphs

    def begin(self, request_ids: Sequence[str]) -> None:
        if self._adapters is not None:
            self._has_adapters = self._adapters.has_any(request_ids)
            num_rows = self.padded_rows(len(request_ids))
            self._adapters.begin_proposal(request_ids, num_rows, self.inputs.query_len)

    def padded_rows(self, num_rows: int) -> int:
        """Return the number of rows that ``run(num_rows)`` reads, whose inputs must be filled."""
        return num_rows if self._graphs is None else self._dispatch(self._graphs, num_rows).num_reqs

    def hidden(self, num_rows: int) -> torch.Tensor:  # [num_rows, query_len, hidden_size]
        """Return the hidden states of the last run."""
        length = self.inputs.query_len
        return self._hidden[: num_rows * length].unflatten(0, (num_rows, length))

    def run(self, num_rows: int) -> torch.Tensor:  # [num_rows, query_len, hidden_size]
        """Run the inputs; the result is valid until the next run."""
        if self._graphs is not None:
            desc = self._dispatch(self._graphs, num_rows)
            if desc.cg_mode == CUDAGraphMode.FULL:
                self._graphs.run_fullgraph(desc)
                return self.hidden(num_rows)
        self._forward(num_rows)
        return self.hidden(num_rows)

    def _dispatch(self, graphs: PassGraphs, num_rows: int):
        length = self.inputs.query_len
        # vLLM's manager rounds up to a captured number of adapters.
        num_active = int(self._has_adapters)
        return graphs.dispatch(num_rows, num_rows * length, length, num_active)

    def _forward(self, num_rows: int) -> None:
        num_tokens, inputs = num_rows * self.inputs.query_len, self.inputs
        tokens, positions = inputs.token_ids[:num_tokens], inputs.positions[:num_tokens]
        model_inputs: dict[str, torch.Tensor | None] = {"input_ids": tokens, "positions": positions}
        if self._is_target:
            deltas = inputs.position_deltas[:num_tokens]
            model_inputs = target_inputs(self.model, self._vllm_config, tokens, positions, deltas)
        elif inputs.hidden is not None:
            model_inputs["hidden_states"] = inputs.hidden[:num_tokens]
        hidden, states = forward(
            self.model,
            self._vllm_config,
            num_tokens,
            model_inputs,
            self._metadata(num_rows),
            self._slots(num_rows),
        )
        self._hidden[:num_tokens].copy_(hidden)
        for buffer, further in zip(self.states, states_read(hidden, states)):
            buffer[:num_tokens].copy_(further)


@dataclass
class GraphedRound:
    """Calls ``work(sampling)``, or replays a CUDA graph of it captured for at least as many rows.

    A replay also processes the padding rows past ``rows.num_rows``. Kernels skip them by
    ``rows.count``, or have nothing to do in them.

    Args:
        work: launches a round for the first ``rows.num_rows`` rows. It reads and writes only
            tensors with fixed addresses and temporaries. The next replay of any graph may
            overwrite its results.
        sampling: parameters of the capture, which may do more than the rows of a replay need.
        passes: the passes that ``work`` runs.
    """

    work: Callable[..., tuple[torch.Tensor, ...]]
    sampling: SamplingV2
    passes: Sequence[ModelPass]
    context: ProposalContext
    name: str

    def __post_init__(self) -> None:
        self._rows = self.context.rows
        self._graphs: PassGraphs | None = None
        self._results: dict[int, tuple[torch.Tensor, ...]] = {}
        self._scratch: list[torch.Tensor] = []

    def capture(self, mode: CUDAGraphMode) -> None:
        vllm_config = self.context.vllm_config
        limit = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        if not limit:
            return
        sizes = round_sizes(self._rows.max_rows, limit)
        graphs = PassGraphs(vllm_config, self.context.device, mode, 1, sizes)
        # 0 rows: the warm-up before the capture writes nothing.
        self._rows.count.zero_()
        graphs.capture_pass(self._capture, f"Capturing TriForce's {self.name}")
        self._graphs = graphs
        self._scratch = kernel_scratch()  # kept alive, as the graphs write to it

    def __call__(self, sampling: SamplingV2, *args) -> tuple[torch.Tensor, ...]:
        """Run a round, in a graph with the defaults of ``args``."""
        num_rows = self._rows.num_rows
        if self._graphs is not None:
            desc = self._graphs.dispatch(num_rows, num_rows, 1, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                return self.replay(desc)
        return self.work(sampling, *args)

    def replay(self, desc) -> tuple[torch.Tensor, ...]:
        assert self._graphs is not None
        self._graphs.run_fullgraph(desc)
        return self._results[desc.num_reqs]

    def _capture(self, num_rows: int) -> None:
        with ExitStack() as stack:
            for model_pass in self.passes:
                stack.enter_context(model_pass.within_capture())
            stack.enter_context(self._rows.with_num_rows(num_rows))
            # Weak references, so that graphs of other sizes can share the memory.
            results = self.work(self.sampling)
            self._results[num_rows] = tuple(weak_ref_tensor(result) for result in results)


def graphed_rounds(
    work: Callable[..., tuple[torch.Tensor, ...]],
    passes: Sequence[ModelPass],
    context: ProposalContext,
    name: str,
) -> dict[str, GraphedRound]:
    """Make the rounds of ``work``, by ``SamplingV2.kind``."""
    return {
        sampling.kind: GraphedRound(work, sampling, passes, context, f"{name}, {sampling.kind}")
        for sampling in CAPTURED_SAMPLING
    }
