"""What Runner V2 tells the scheduler of a proposal.

What stands in the place of vLLM's speculator on Model Runner V2, whatever it proposes.

Plain decoding over a KV cache in host memory, on Model Runner V2 (``levels="3"``).
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
from vllm_triforce.attention.query_recorder import NullRecorder
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
    """Tells the scheduler which tokens were proposed for each request, maybe none.

    vLLM's own announces ``num_speculative_tokens`` placeholders for every request. So does an
    asynchronous scheduler by itself, which asks only where a grammar has to see the tokens.

    Args:
        is_asynchronous: the scheduler does not ask, but for structured output.
    """

    def __init__(self, device: torch.device, is_asynchronous: bool) -> None:
        super().__init__(device)
        self._is_asynchronous = is_asynchronous
        self._tokens: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._num_places = 0
        self._held: tuple[torch.Tensor, ...] = ()
        self._copied: tuple[np.ndarray, ...] | None = None

    def proposed(
        self,
        tokens: torch.Tensor,  # [num_reqs, num_speculative_tokens], int64
        lengths: torch.Tensor | None,  # [num_reqs], int32; None: nothing was proposed
    ) -> None:
        self._tokens, self._lengths = tokens, lengths
        self._num_places = tokens.shape[1]

    def set_draft_tokens(self, input_batch, draft_tokens) -> None:
        self.req_ids = input_batch.req_ids
        if self._copied is not None:
            self.copy_event.synchronize()
        self._copied = None
        if self._lengths is None:
            return
        if self._is_asynchronous and not input_batch.has_structured_output_reqs:
            return
        # Held until they are copied: the next step writes over vLLM's own buffer.
        self._held = self._tokens.clone(), self._lengths
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._copied = tuple(async_copy_to_np(tensor) for tensor in self._held)
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds:
        num_reqs = len(self.req_ids)
        if self._copied is None:
            tokens = [[PAD_TOKEN] * self._num_places for _ in range(num_reqs)]
            lengths = [0] * num_reqs
        else:
            self.copy_event.synchronize()
            tokens, lengths = (copied.tolist() for copied in self._copied)
        if self._is_asynchronous:
            # The full pass verifies the padding too, so the grammar has to see it.
            return DraftTokenIds(self.req_ids, tokens)
        return DraftTokenIds(self.req_ids, [row[:length] for row, length in zip(tokens, lengths)])


class SpeculatorV2(RunnerAdapter, StandaloneARSpeculator):
    """Of vLLM's class it keeps how a draft model is loaded and the buffers that the runner reads.

    The runner (vllm/v1/worker/gpu/model_runner.py) calls ``propose`` after the outcome of a full
    pass is in its request states, writes what it returns to ``req_states.draft_tokens``, and lets
    its ``draft_tokens_handler`` report to the scheduler. The next rejection test reads level 2's
    distributions (``request_facts.py``), not this class's ``draft_logits``, which are None.
    """

    num_extra_query_per_req = 0
    graph_bytes = 0
    """Of CUDA graphs of proposals, as far as vLLM has measured its own."""

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(vllm_config, device)
        self.config = config
        self.model = cast(torch.nn.Module, None)  # until there is a draft
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list = []
        self._runner = runner
        self._draft_model = draft_model
        self._handler = ProposedTokensHandler(device, vllm_config.scheduler_config.async_scheduling)
        swaps.DRAFT_TOKENS_HANDLER.set(runner, self._handler)

    # Start-up, in the order of the calls.

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
        """Nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def begin_step(self, scheduler_output) -> None:
        """Removes the last blocks of requests, where the scheduler has taken them back."""
        places, tables = self._runner.req_states.req_id_to_index, self._runner.block_tables
        for name, counts in blocks_kept(scheduler_output).items():
            if name in places:
                tables.num_blocks.np[:, places[name]] = counts

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        choose_decode_graphs(self._runner, self.target_layers)

    def propose_nothing(self, num_reqs: int) -> torch.Tensor:
        """Padding, [num_reqs, num_speculative_tokens], int64, and no word of it to the
        scheduler."""
        draft_tokens = self.draft_tokens[:num_reqs].fill_(PAD_TOKEN)
        self._handler.proposed(draft_tokens, None)
        return draft_tokens


class PlainSpeculatorV2(SpeculatorV2):
    """Proposes nothing, ever: it has layers in host memory staged, and keeps nothing beside."""

    def capture(self) -> None:
        """Nothing."""

    def allocate(self, kv_cache_config, offload) -> None:
        """Tells layers in host memory, once the KV cache exists."""
        self._counts = DeviceCounters(self.device)
        backend = platform_for(current_platform).retrieval()
        _, layers, builder = group_layers(
            kv_cache_config,
            self._runner.attn_groups,
            self._runner.block_tables.block_sizes,
            self.target_layers,
            backend,
            self.config,
        )
        offload.check_attached([layer.layer_name for layer in layers])
        backend(
            layers,
            builder,
            NullRecorder(),
            offload.for_attention({}, self._counts.sums, self.device),
        )

    @property
    def counters(self) -> LevelCounters:
        return self._counts.read()

    @property
    def sent_counters(self) -> LevelCounters:
        return self._counts.known

    def measured_passes(self, anew: bool) -> None:
        """Nothing is chosen."""

    def held_requests(self) -> dict[str, int]:
        return {}

    def synchronize_times(self, synchronize: bool) -> None:
        """No part is timed."""

    @torch.inference_mode()
    def propose(
        self, input_batch, *args, dummy_run: bool = False, **kwargs
    ) -> torch.Tensor:  # [num_reqs, num_speculative_tokens], int64
        if not dummy_run:
            self._counts.note()
        return self.propose_nothing(input_batch.num_reqs)
