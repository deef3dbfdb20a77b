"""Puts the device-resident loop together, for Model Runner V2."""

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from vllm_triforce.attention.backends import backend_for
from vllm_triforce.attention.base import DraftAttention
from vllm_triforce.attention.query_recorder import StaticQueryRecorder
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.kv_groups import group_layers
from vllm_triforce.device.level1 import (
    DeviceLevel1,
    DevicePromptLookup,
    DeviceStreaming,
    WindowRebuild,
)
from vllm_triforce.device.model_pass import ModelPass
from vllm_triforce.device.retrieval import DeviceRetrieval
from vllm_triforce.device.selections import DeviceSelections
from vllm_triforce.device.slots import Slots
from vllm_triforce.device.triforce import DeviceTriForce
from vllm_triforce.kernels.faults import BlockCleaner
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.worker.layers import private_cache


class DeviceBuild:
    """The loop and the parts that the runner's adapter needs.

    Args:
        target_layers, draft_layers: attention layers by name.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab], for the outer test.
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
        draft_logits: torch.Tensor,
        device: torch.device,
    ) -> None:
        backend = backend_for(current_platform)
        retrieval_attention = backend.retrieval()
        block_sizes = runner.block_tables.block_sizes
        groups, layers, builder = group_layers(
            kv_cache_config,
            runner.attn_groups,
            block_sizes,
            target_layers,
            retrieval_attention,
            config,
        )
        first = layers[0]
        dtype = vllm_config.model_config.dtype
        self.num_slots = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
        self.rows = rows = Rows(
            self.num_slots, config.num_speculative_tokens, config.gamma, self.num_slots, device
        )
        self.recorder = StaticQueryRecorder(
            len(layers),
            runner.input_buffers.query_start_loc,
            first.num_heads,
            first.head_size,
            config.num_speculative_tokens + 1,
            config.min_context,
            dtype,
        )
        attention = retrieval_attention(layers, builder, self.recorder)
        selections = DeviceSelections(
            config,
            attention,
            self.recorder.queries,
            first.kv_cache.shape[0],
            first.num_kv_heads,
            dtype,
            rows,
            self.num_slots,
            device,
        )
        level2 = DeviceRetrieval(
            target,
            vllm_config,
            groups,
            attention,
            selections,
            rows,
            vllm_config.model_config.max_model_len - 1,
            device,
        )
        race = Race(self.num_slots, draft_logits.shape[2], device)
        level1: DeviceLevel1 = DevicePromptLookup(config.prompt_lookup_max)
        if draft is not None:
            cache, builder = private_cache(
                draft_layers, vllm_config, config, self.num_slots, device
            )
            level1 = self._streaming(
                draft,
                backend.draft()(draft_layers, builder),
                cache,
                vllm_config,
                config,
                draft_logits,
                race,
                device,
                BlockCleaner([x.kv_cache for x in draft_layers.values()], cache.block_size, device),
            )
        self.slots = Slots(self.num_slots)
        self.triforce = DeviceTriForce(config, level1, level2, rows, self.slots, draft_logits, race)

    def _streaming(
        self,
        draft,
        attention: DraftAttention,
        cache,
        vllm_config,
        config,
        draft_logits,
        race,
        device,
        cleaner,
    ) -> DeviceStreaming:
        draft_config = vllm_config.speculative_config.draft_model_config
        capacity = cache.blocks_per_slot * cache.block_size
        # A row's blocks stay where they are, row by row: a graph may be replayed for any slots.
        tables = torch.zeros_like(cache.block_table)

        def make_pass(query_len: int, name: str) -> ModelPass:
            def metadata(num_rows: int) -> dict:
                seq_lens = made.inputs.seq_lens[:num_rows]
                return attention.uniform(num_rows, query_len, seq_lens, tables[:num_rows], capacity)

            def slots(num_rows: int) -> dict[str, torch.Tensor]:
                return dict.fromkeys(
                    attention.layer_names, made.inputs.slot_mapping[: num_rows * query_len]
                )

            made = ModelPass(
                draft,
                vllm_config,
                self.num_slots,
                query_len,
                self.num_slots,
                draft_config.get_hidden_size(),
                draft_config.dtype,
                device,
                metadata,
                slots,
                name,
            )
            return made

        return DeviceStreaming(
            draft,
            make_pass,
            WindowRebuild(
                draft,
                vllm_config,
                cache,
                attention.layer_names,
                attention.ragged,
                vllm_config.scheduler_config.max_num_batched_tokens,
                device,
            ),
            cache,
            tables,
            config.num_sink_tokens,
            config.num_recent_tokens,
            config.window_tokens,
            self.rows,
            draft_logits.shape[2],
            draft_logits.dtype,
            race,
            cleaner,
        )

    def capture(self, mode: CUDAGraphMode) -> None:
        self.triforce.capture(mode)
