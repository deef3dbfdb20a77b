"""Adapter in the place of vLLM's speculator on Model Runner V2: models, blocks and reports."""

from functools import partial
from typing import cast

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.messages import blocks_kept
from vllm_triforce.core.models import with_own_layers
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.kernels.proposals import PAD_TOKEN
from vllm_triforce.runner_v2.decode_graphs import choose_decode_graphs
from vllm_triforce.runner_v2.reports import ProposedTokensHandler
from vllm_triforce.vllm_patches import swaps


class BaseAdapterV2(RunnerAdapter, StandaloneARSpeculator):
    """Base of the adapter; vLLM's class loads the draft and has the buffers the runner reads.

    The runner (vllm/v1/worker/gpu/model_runner.py) calls ``propose`` when the outcome of a full
    pass is in its request states. It writes the result to ``req_states.draft_tokens``, and its
    ``draft_tokens_handler`` reports to the scheduler. The next rejection test reads level 2's
    distributions (``rejection.py``), not this class's ``draft_logits``, which is None.
    """

    num_extra_query_per_req = 0
    graph_bytes = 0
    """Estimated bytes of proposals' CUDA graphs, once vLLM has measured its own graphs."""

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(with_own_layers(vllm_config), device)
        self.set_up(runner, config, draft_model)
        self.model = cast(torch.nn.Module, None)  # until a draft is loaded
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list = []
        self._handler = ProposedTokensHandler(device, vllm_config.scheduler_config.async_scheduling)
        swaps.DRAFT_TOKENS_HANDLER.set(runner, self._handler)

    # Start-up, in the order of vLLM's calls.

    def load_model(self, target_model) -> None:
        self.load_models(target_model, partial(super().load_model, target_model))

    def load_draft_model(self, target_model, target_attn_layer_names: set[str]) -> torch.nn.Module:
        if self.config.has_head:
            return load_eagle_model(target_model, self.vllm_config)
        return super().load_draft_model(target_model, target_attn_layer_names)

    def set_attn(self, *args, **kwargs) -> None:
        """Do nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def begin_step(self, scheduler_output) -> None:
        """Remove blocks from block tables that the scheduler has taken back."""
        states, tables = self._runner.req_states.req_id_to_index, self._runner.block_tables
        for request_id, num_blocks in blocks_kept(scheduler_output).items():
            if request_id in states:
                tables.num_blocks.np[:, states[request_id]] = num_blocks

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        choose_decode_graphs(self._runner)

    def propose_nothing(self, num_reqs: int) -> torch.Tensor:
        """Return padding, [num_reqs, num_speculative_tokens], int64, and report no proposals."""
        draft_tokens = self.draft_tokens[:num_reqs].fill_(PAD_TOKEN)
        self._handler.set_proposals(draft_tokens, None)
        return draft_tokens
