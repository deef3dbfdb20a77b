"""Build TriForce's speculator for Model Runner V2."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from vllm_triforce.attention.base import HostLayer
from vllm_triforce.attention.platforms import attention_for
from vllm_triforce.config.budget import fit_blocks
from vllm_triforce.config.draft_sources import SOURCES_V2
from vllm_triforce.config.synthetic import rates_by_place
from vllm_triforce.core.kv_groups import (
    KVGroup,
    check_kernel_blocks,
    group_layers,
    recurrent_layers,
    retrieval_block_size,
)
from vllm_triforce.core.models import Level2Model, fusion_of
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.proposals import DraftLogits
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.synthetic import SyntheticTest
from vllm_triforce.metrics.counters import DeviceCounters
from vllm_triforce.runner_v2.adapters import LevelAdapters
from vllm_triforce.runner_v2.batch import Placeholders, ProposalContext, Slots
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.recurrent import RecurrentLayers
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.selections import SelectionsV2
from vllm_triforce.runner_v2.sources.source import DraftSourceV2, HiddenStatesV2, SourcePartsV2
from vllm_triforce.runner_v2.speculator import SpeculatorV2

if TYPE_CHECKING:
    from vllm_triforce.offload.cache import OffloadedCache


class SpeculatorPartsV2:
    """Speculator of one engine, and the parts of it that the runner's adapter uses."""

    def __init__(
        self,
        adapter: RunnerAdapter,
        runner,
        kv_cache_config,
        offload: "OffloadedCache | None" = None,
    ) -> None:
        config, device, vllm_config = adapter.config, adapter.device, runner.vllm_config
        model_config, scheduler_config = vllm_config.model_config, vllm_config.scheduler_config
        vocab_size = model_config.get_vocab_size()
        groups, layers, builder = [], [], None
        has_level2 = config.uses_level2 or offload is not None
        if has_level2:
            retrieval = attention_for(current_platform).retrieval
            block_sizes = runner.block_tables.block_sizes
            check_kernel_blocks(block_sizes, runner.kernel_block_sizes)
            groups, layers, builder = group_layers(
                kv_cache_config,
                runner.attn_groups,
                block_sizes,
                adapter.target_layers,
                retrieval,
                recurrent_layers(vllm_config),
            )
            config = fit_blocks(config, retrieval.chunk_size(retrieval_block_size(groups)))
        self.num_slots = min(scheduler_config.max_num_seqs, config.max_speculating_seqs)
        self.slots = Slots(self.num_slots)
        self.rows = Rows(config, self.num_slots, vocab_size, device)
        self.tables = [
            torch.zeros_like(table.gpu[: self.num_slots])
            for table in runner.block_tables.block_tables
        ]
        """For each KV cache group, [num_slots, width], int32: block tables of a proposal's rows."""
        self.logits_processing = LogitsProcessing(runner.sampler, runner.req_states, self.rows)
        self.adapters = None if runner.lora_config is None else LevelAdapters(runner)
        self.context = ProposalContext(
            vllm_config,
            config,
            self.rows,
            model_config.head_dtype,
            ExponentialSampler(self.num_slots, vocab_size, device),
            self.logits_processing,
            DeviceCounters(device),
            device,
            self.slots,
            Placeholders(runner),
        )
        self.hidden_states = self._hidden_states(adapter) if config.has_head else None
        level2 = None
        if has_level2:
            level2 = self._level2(adapter, runner, groups, layers, builder, offload)
        sources = self._sources(adapter, runner.req_states.all_token_ids.gpu)
        self.speculator = SpeculatorV2(
            self.context,
            sources,
            sources[config.sources[0]] if config.levels == "1,2,3" else None,
            level2,
            self._draft_logits(vocab_size),
        )

    def _sources(
        self,
        adapter: RunnerAdapter,
        token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32, of vLLM's requests
    ) -> dict[str, DraftSourceV2]:
        parts = SourcePartsV2(
            self.context,
            adapter.model,
            adapter.draft_layers,
            adapter.vllm_config,
            attention_for(current_platform).draft,
            token_ids,
            self.hidden_states,
        )
        return {name: SOURCES_V2[name].build(parts) for name in self.context.config.sources}

    def _draft_logits(self, vocab_size: int) -> DraftLogits:
        """Allocate the distributions that level 3 reads."""
        context, config, num_slots = self.context, self.context.config, self.num_slots
        max_num_seqs = context.vllm_config.scheduler_config.max_num_seqs
        shape = (num_slots, config.num_speculative_tokens, vocab_size)
        logits = torch.zeros(shape, dtype=context.logits_dtype, device=context.device)
        synthetic = None
        rates = context.vllm_config.speculative_config.synthetic_acceptance_rates
        if rates is not None:
            synthetic = SyntheticTest(
                rates_by_place(rates),
                config.synthetic_level1_acceptance,
                num_slots + max_num_seqs,
                context.device,
            )
        return DraftLogits(logits, max_num_seqs, synthetic)

    def _hidden_states(self, adapter: RunnerAdapter) -> HiddenStatesV2:
        draft_config = self.context.vllm_config.speculative_config.draft_model_config
        return HiddenStatesV2(
            fusion_of(adapter.model),
            self.rows,
            self.context.config.state_capacity,
            draft_config.get_hidden_size(),
            draft_config.dtype,
            self.context.device,
        )

    def _level2(
        self,
        adapter: RunnerAdapter,
        runner,
        groups: list[KVGroup],
        layers: list,
        builder: Any,
        offload: "OffloadedCache | None",
    ) -> RetrievalLevelV2 | None:
        """Build level 2 over the target's KV cache; without it, stage layers in host memory."""
        context, config, level2_model = self.context, self.context.config, adapter.level2_model
        sums = context.counters.sums
        host_layers: dict[str, HostLayer] = {}
        if offload is not None:
            names = [layer.layer_name for layer in layers]
            num_blocks = self.num_slots * config.table_width * config.uses_level2
            host_layers = offload.host_layers(names, num_blocks, sums)
        attention = attention_for(current_platform).retrieval(layers, builder, host_layers)
        if not config.uses_level2:
            return None
        split = attention.chunk_ids().split
        table = self.tables[next(i for i, g in enumerate(groups) if g.sparse_layer_names)]
        chunk_tables = table
        if split > 1:
            chunk_tables = table.new_zeros(len(table), table.shape[1] * split)
        num_chunks = layers[0].kv_cache.shape[0] * split
        selections = SelectionsV2(config, attention, num_chunks, self.rows, chunk_tables)
        pool = None
        if host_layers:
            from vllm_triforce.kernels.offload import RetrievalPool

            pool = RetrievalPool(
                [layer.host for layer in host_layers.values()],
                [layer.pool for layer in host_layers.values() if layer.pool is not None],
                selections.tables,
                attention.chunk_ids(),
                config.max_selected_blocks,
                selections.in_pass,
                sums,
                self.rows,
            )
        return RetrievalLevelV2(
            context,
            level2_model,
            groups,
            attention,
            selections,
            self.tables,
            self._recurrent(level2_model, groups, runner.model_state),
            None if level2_model.is_copy else self.adapters,
            pool,
            self.hidden_states,
        )

    def _recurrent(
        self, level2_model: Level2Model, groups: list[KVGroup], model_state: Any
    ) -> RecurrentLayers | None:
        """Build level 2's recurrent layers, if the target has such."""
        vllm_config, device = self.context.vllm_config, self.context.device
        if not (layers := recurrent_layers(vllm_config)):
            return None
        level2_layers = recurrent_layers(level2_model.vllm_config)
        return RecurrentLayers(layers, level2_layers, groups, self.rows, model_state, device)
