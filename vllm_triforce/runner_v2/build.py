"""Puts the device-resident loop together, for Model Runner V2."""

from typing import TYPE_CHECKING

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from vllm_triforce.attention.platforms import platform_for
from vllm_triforce.attention.query_recorder import StaticQueryRecorder
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.draft_sources import SOURCES_V2
from vllm_triforce.core.kv_groups import check_kernel_blocks, group_layers
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.proposals import DraftLogits
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.metrics.counters import DeviceCounters
from vllm_triforce.runner_v2.adapters import LevelAdapters
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.proposer import ProposerV2
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.selections import SelectionsV2
from vllm_triforce.runner_v2.slots import Slots
from vllm_triforce.runner_v2.sources.source import SourcePartsV2

if TYPE_CHECKING:
    from vllm_triforce.offload.cache import OffloadedCache


class SpeculatorBuild:
    """The loop and the parts that the runner's adapter needs.

    Args:
        target_layers, draft_layers: attention layers by name.
        vocab_size: of the draft's logits, which the outer test compares with the target's.
        offload: where some layers' KV cache lies in host memory.
    """

    def __init__(
        self,
        vllm_config,
        config: ResolvedConfig,
        runner,
        target,
        target_layers: dict,
        draft,
        draft_layers: dict,
        kv_cache_config,
        vocab_size: int,
        device: torch.device,
        offload: "OffloadedCache | None" = None,
    ) -> None:
        backend = platform_for(current_platform)
        retrieval_attention = backend.retrieval()
        block_sizes = runner.block_tables.block_sizes
        check_kernel_blocks(block_sizes, runner.kernel_block_sizes)
        groups, layers, builder = group_layers(
            kv_cache_config,
            runner.attn_groups,
            block_sizes,
            target_layers,
            retrieval_attention,
            config,
        )
        first = layers[0]
        dtype, logits_dtype = vllm_config.model_config.dtype, vllm_config.model_config.head_dtype
        self.num_slots = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
        self.rows = rows = Rows(
            self.num_slots,
            config.num_speculative_tokens,
            config.gamma,
            self.num_slots,
            vocab_size,
            device,
        )
        self.recorder = StaticQueryRecorder(
            len(layers),
            runner.input_buffers.query_start_loc,
            config.max_batch,
            first.num_heads,
            first.head_size,
            config.num_speculative_tokens + 1,
            config.min_context,
            dtype,
        )
        if offload is not None:
            offload.check_attached([layer.layer_name for layer in layers])
        pools = (
            {}
            if offload is None
            else offload.allocate_pools(self.num_slots * config.table_width, vllm_config, device)
        )
        counts = DeviceCounters(device)
        host_layers = {}
        if offload is not None:
            host_layers = offload.make_host_layers(pools, counts.sums)
        attention = retrieval_attention(layers, builder, self.recorder, host_layers)
        selections = SelectionsV2(
            config,
            attention,
            self.recorder.queries,
            first.kv_cache.shape[0],
            first.num_kv_heads,
            rows,
            self.num_slots,
            device,
        )
        self.tables = [
            torch.zeros_like(table.gpu[: self.num_slots])
            for table in runner.block_tables.block_tables
        ]
        """Of each KV cache group, [num_slots, width], int32: block tables of a proposal's rows."""
        pool = None
        if pools:
            from vllm_triforce.offload.pool import RetrievalPool

            pool = RetrievalPool(
                [layer.kv_cache for layer in layers if layer.layer_name in pools],
                list(pools.values()),
                len(layers) - len(pools),
                config.table_width,
                attention.head_strides(),
                selections.max_selected,
                counts.sums,
                rows,
            )
        self.shaping = LogitsProcessing(runner.sampler, runner.req_states, rows)
        self.adapters = None if runner.lora_config is None else LevelAdapters(runner)
        level2 = RetrievalLevelV2(
            target,
            vllm_config,
            groups,
            attention,
            selections,
            rows,
            vllm_config.model_config.max_model_len - 1,
            self.tables,
            logits_dtype,
            self.shaping,
            device,
            self.adapters,
            pool,
        )
        race = ExponentialSampler(self.num_slots, vocab_size, device)
        parts = SourcePartsV2(
            vllm_config,
            config,
            draft,
            draft_layers,
            backend.draft(),
            rows,
            self.num_slots,
            vocab_size,
            logits_dtype,
            race,
            runner.req_states.all_token_ids.gpu,
            self.shaping,
            device,
        )
        sources = {name: SOURCES_V2[name].build(parts) for name in config.sources}
        level1 = None if config.levels == "2,3" else sources[config.sources[0]]
        self.slots = Slots(self.num_slots)
        # Rounded to this before anything is drawn from them.
        draft_logits = torch.zeros(
            self.num_slots,
            config.num_speculative_tokens,
            vocab_size,
            dtype=logits_dtype,
            device=device,
        )
        self.triforce = ProposerV2(
            config,
            sources,
            level1,
            level2,
            rows,
            self.slots,
            DraftLogits.allocate(draft_logits, vllm_config.scheduler_config.max_num_seqs),
            race,
            self.shaping,
            counts,
        )

    def capture(self, mode: CUDAGraphMode) -> None:
        self.triforce.capture(mode)
