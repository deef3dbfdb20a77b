"""What stands in the place of vLLM's speculator on Model Runner V2, whatever it proposes."""

from typing import cast

import torch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.kv_groups import attention_layers
from vllm_triforce.kernels.bookkeeping import PAD_TOKEN
from vllm_triforce.scheduler.lookahead import blocks_kept
from vllm_triforce.vllm_patches import swaps
from vllm_triforce.worker.adapter import RunnerAdapter
from vllm_triforce.worker.draft_loading import loading_draft
from vllm_triforce.worker.v2.decode_graphs import choose_decode_graphs
from vllm_triforce.worker.v2.proposal import ProposedTokensHandler


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
