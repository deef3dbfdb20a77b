"""Speculators that take the place of vLLM's on Model Runner V2.

``SpeculatorV2`` is the common base. ``PlainSpeculatorV2`` proposes nothing: plain decoding with
layers of the KV cache in host memory (``levels="3"``).
"""

from typing import cast

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_triforce.attention.platforms import platform_for
from vllm_triforce.attention.query_recorder import Recorder
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.draft_cache import loading_draft
from vllm_triforce.core.kv_groups import attention_layers, group_layers
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.kernels.proposals import PAD_TOKEN
from vllm_triforce.metrics.counters import DeviceCounters, LevelCounters
from vllm_triforce.runner_v2.decode_graphs import choose_decode_graphs
from vllm_triforce.scheduler.lookahead import blocks_kept
from vllm_triforce.vllm_patches import swaps


class ProposedTokensHandler(DraftTokensHandler):
    """Reports each request's proposed tokens to the scheduler.

    vLLM's handler reports ``num_speculative_tokens`` placeholders for every request. An
    asynchronous scheduler assumes the same number, and reads the tokens only for structured output.

    Args:
        is_asynchronous: True if the scheduler is asynchronous.
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
        """Set the proposals of the step's requests."""
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


class SpeculatorV2(RunnerAdapter, StandaloneARSpeculator):
    """Base of the speculators; vLLM's class loads the draft and has the buffers the runner reads.

    The runner (vllm/v1/worker/gpu/model_runner.py) calls ``propose`` when the outcome of a full
    pass is in its request states. It writes the result to ``req_states.draft_tokens``, and its
    ``draft_tokens_handler`` reports to the scheduler. The next rejection test reads level 2's
    distributions (``request_flags.py``), not this class's ``draft_logits``, which is None.
    """

    num_extra_query_per_req = 0
    graph_bytes = 0
    """Estimated bytes of proposals' CUDA graphs, once vLLM has measured its own graphs."""

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(vllm_config, device)
        self.config = config
        self.model = cast(torch.nn.Module, None)  # until a draft is loaded
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list = []
        self._runner = runner
        self._draft_model = draft_model
        self._handler = ProposedTokensHandler(device, vllm_config.scheduler_config.async_scheduling)
        swaps.DRAFT_TOKENS_HANDLER.set(runner, self._handler)

    # Start-up, in the order of vLLM's calls.

    def load_model(self, target_model) -> None:
        self._target = target_model
        self.target_layers = attention_layers(self.vllm_config)
        if self._draft_model is not None:
            with loading_draft(self._draft_model):
                super().load_model(target_model)

    @property
    def draft_layer_names(self) -> set[str]:
        return self.draft_attn_layer_names

    def set_attn(self, *args, **kwargs) -> None:
        """Do nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def begin_step(self, scheduler_output) -> None:
        """Remove blocks from block tables that the scheduler has taken back."""
        states, tables = self._runner.req_states.req_id_to_index, self._runner.block_tables
        for request_id, num_blocks in blocks_kept(scheduler_output).items():
            if request_id in states:
                tables.num_blocks.np[:, states[request_id]] = num_blocks

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        choose_decode_graphs(self._runner, self.target_layers)

    def propose_nothing(self, num_reqs: int) -> torch.Tensor:
        """Return padding, [num_reqs, num_speculative_tokens], int64, and report no proposals."""
        draft_tokens = self.draft_tokens[:num_reqs].fill_(PAD_TOKEN)
        self._handler.set_proposals(draft_tokens, None)
        return draft_tokens


class PlainSpeculatorV2(SpeculatorV2):
    """Proposes nothing; attaches staging to layers whose KV cache lies in host memory."""

    def capture(self) -> None:
        """Do nothing: there are no proposals."""

    def allocate(self, kv_cache_config, offload) -> None:
        """Attach the staging of host layers, once the KV cache exists."""
        self._counts = DeviceCounters(self.device)
        attention_class = platform_for(current_platform).retrieval()
        _, layers, builder = group_layers(
            kv_cache_config,
            self._runner.attn_groups,
            self._runner.block_tables.block_sizes,
            self.target_layers,
            attention_class,
            self.config,
        )
        offload.check_attached([layer.layer_name for layer in layers])
        attention_class(
            layers, builder, Recorder(), offload.make_host_layers({}, self._counts.sums)
        )

    @property
    def counters(self) -> LevelCounters:
        return self._counts.read()

    @property
    def sent_counters(self) -> LevelCounters:
        return self._counts.known

    def measured_passes(self, anew: bool) -> None:
        """Return None: nothing is chosen by measurements."""

    def held_requests(self) -> dict[str, int]:
        return {}

    def synchronize_times(self, synchronize: bool) -> None:
        """Do nothing: no part is timed."""

    @torch.inference_mode()
    def propose(
        self, input_batch, *args, dummy_run: bool = False, **kwargs
    ) -> torch.Tensor:  # [num_reqs, num_speculative_tokens], int64
        if not dummy_run:
            self._counts.note()
        return self.propose_nothing(input_batch.num_reqs)
