"""Level 2: the target, or its copy, over the retrieval cache (paper, section 4.2)."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.attention.base import LayerSelection, RetrievalAttention
from vllm_triforce.core.kv_groups import KVGroup
from vllm_triforce.core.models import Level2Model, num_states
from vllm_triforce.kernels.draw import Distributions, LevelLogits
from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.pass_inputs import PassInputs, prepare_target_inputs
from vllm_triforce.kernels.row_table import Owner
from vllm_triforce.runner_v2.adapters import LevelAdapters
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext, Slot
from vllm_triforce.runner_v2.passes import GraphedRound, ModelPass, graphed_rounds
from vllm_triforce.runner_v2.recurrent import RecurrentLayers
from vllm_triforce.runner_v2.sampling import SamplingV2, masked_logits, row_masks
from vllm_triforce.runner_v2.selections import SelectionsV2
from vllm_triforce.runner_v2.sources.source import HiddenStatesV2

if TYPE_CHECKING:
    from vllm_triforce.kernels.offload import RetrievalPool


class DenseLayers:
    """Layers of one kind that stay dense at level 2, as those with a sliding window.

    They read the same KV as in a full pass. All buffers have fixed addresses.

    Args:
        names, builder: layers of a KV cache group that are alike (``KVGroup.dense``).
        inputs: input buffers of level 2's pass.
        seq_lens: [max_rows], int32, tokens of each row after the pass.
        table: [max_rows, width], int32, the rows' block tables in this group.
        max_seq_len: context length of the target.
    """

    def __init__(
        self,
        names: list[str],
        builder: Any,
        block_size: int,
        inputs: PassInputs,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_seq_len: int,
    ) -> None:
        self.names = names
        self._builder = builder
        self._block_size = block_size
        self._inputs = inputs
        self._seq_lens = seq_lens
        self._table = table
        self._max_seq_len = max_seq_len
        self._starts_cpu = torch.arange(len(seq_lens) + 1, dtype=torch.int32) * inputs.query_len
        self._starts = self._starts_cpu.to(seq_lens.device)
        row_indices = torch.arange(len(seq_lens), device=seq_lens.device)
        self._row_indices = row_indices.repeat_interleave(inputs.query_len)
        self._slot_mapping = torch.empty_like(inputs.slot_mapping)

    def slots(self, num_rows: int) -> torch.Tensor:  # [num_rows * query_len], int64
        """Write this group's slot mapping, -1 where ``inputs.slot_mapping`` is -1."""
        num_tokens = num_rows * self._inputs.query_len
        positions = self._inputs.positions[:num_tokens]
        row_indices, block_size = self._row_indices[:num_tokens], self._block_size
        blocks = self._table[row_indices, positions // block_size].to(torch.int64)
        mapping = blocks * block_size + positions % block_size
        sparse = self._inputs.slot_mapping[:num_tokens]
        return torch.where(sparse < 0, sparse, mapping, out=self._slot_mapping[:num_tokens])

    def metadata(self, num_rows: int) -> Any:
        """Build the backend's metadata; a graph of the pass captures the builder's kernels."""
        length = self._inputs.query_len
        num_tokens = num_rows * length
        common = CommonAttentionMetadata(
            query_start_loc=self._starts[: num_rows + 1],
            query_start_loc_cpu=self._starts_cpu[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            num_reqs=num_rows,
            num_actual_tokens=num_tokens,
            max_query_len=length,
            max_seq_len=self._max_seq_len,
            block_table_tensor=self._table[:num_rows],
            slot_mapping=self._slot_mapping[:num_tokens],
            causal=True,
            positions=self._inputs.positions[:num_tokens],
        )
        return self._builder.build(0, common)


class RetrievalLevelV2:
    """Verifies drafts in one sparse pass of the target, ``gamma + 1`` tokens a row.

    The pass writes KV into the lookahead slots that the scheduler reserved. The full pass writes
    the same slots again, so no approximate KV remains. Rows without drafts to verify take part and
    write nothing.

    Args:
        level2_model: the target, or its copy.
        groups: vLLM's KV cache groups; one of them has all sparse layers.
        tables: buffers of each batch's block tables, [max_rows, width], int32, one for each group.
        recurrent: None if no layer is recurrent.
        adapters: None without LoRA, and for a copy of the target, which has none.
        pool: blocks of the layers whose KV cache lies in host memory, which are the last layers;
            None if there are none.
        hidden_states: where a head reads the states of auxiliary layers; None without a head.
    """

    def __init__(
        self,
        context: ProposalContext,
        level2_model: Level2Model,
        groups: list[KVGroup],
        attention: RetrievalAttention,
        selections: SelectionsV2,
        tables: list[torch.Tensor],
        recurrent: RecurrentLayers | None = None,
        adapters: LevelAdapters | None = None,
        pool: "RetrievalPool | None" = None,
        hidden_states: HiddenStatesV2 | None = None,
    ) -> None:
        rows = context.rows
        self._hidden_states = hidden_states
        self._context = context
        self._model, vllm_config, _ = level2_model
        self._recurrent = recurrent
        if recurrent is not None:
            vllm_config = recurrent.config(vllm_config)
        self._groups = groups
        self._sparse_index = next(i for i, g in enumerate(groups) if g.sparse_layer_names)
        self._sparse_group = groups[self._sparse_index]
        self._attention = attention
        self.selections = selections
        self._rows = rows
        self._max_position = context.vllm_config.model_config.max_model_len - 1
        self._dense_seq_lens = torch.zeros(rows.max_rows, dtype=torch.int32, device=context.device)
        self._split = selections.chunk_tables.shape[1] // tables[self._sparse_index].shape[1]
        self._parts = torch.arange(self._split, dtype=torch.int32, device=context.device)
        self.pool = pool
        layer_names = self._sparse_group.sparse_layer_names
        self._pooled_names = set() if pool is None else set(layer_names[-pool.num_layers :])
        self._scrubbers = [self._scrubber(group, vllm_config) for group in groups]
        num_seqs = rows.max_rows * attention.num_kv_heads
        self.model_pass = ModelPass(
            self._model,
            vllm_config,
            PassInputs(rows.max_rows, rows.gamma + 1, num_seqs, context.device),
            vllm_config.model_config,
            self._metadata,
            self._slots,
            "level 2 pass",
            adapters,
            0 if hidden_states is None else num_states(context.vllm_config),
            is_target=True,
        )
        self._dense = self._dense_layers(tables)
        self._has_adapters = adapters is not None
        # A round is two graphs: the pass, with or without the launches that select, and its logits,
        # by the kind of sampling.
        self._selection: LayerSelection | None = selections.in_pass if pool is None else pool
        parts = SamplingV2(True), [self.model_pass], context
        without = "level 2 round without selection"
        self._passes = {
            True: GraphedRound(self._run_pass, *parts, "level 2 round"),
            False: GraphedRound(self._run_without_selection, *parts, without),
        }
        self._logits = graphed_rounds(self._compute_logits, [], context, "level 2 logits")

    def _dense_layers(self, tables: list[torch.Tensor]) -> list[DenseLayers]:
        """Return the layers that read the whole context."""
        inputs, max_len = self.model_pass.inputs, self._max_position + 1
        return [
            DenseLayers(*kind, group.block_size, inputs, self._dense_seq_lens, table, max_len)
            for group, table in zip(self._groups, tables)
            for kind in group.dense
        ]

    def _scrubber(self, group: KVGroup, vllm_config) -> NanScrubber | None:
        """Make the scrubber of a group's layers on the device, if it has any."""
        layers = vllm_config.compilation_config.static_forward_context
        names = {*group.sparse_layer_names, *group.dense_layer_names} - self._pooled_names
        caches = [layers[layer_name].kv_cache for layer_name in sorted(names)]
        return NanScrubber(caches, group.block_size, self._context.device) if caches else None

    def capture(self, mode) -> None:
        # Dense layers' metadata may depend on more than shapes; then nothing can be captured.
        builders = [builder for group in self._groups for _, builder in group.dense]
        if not all(map(self._attention.has_static_metadata, builders)):
            return
        if self.pool is not None:
            self.pool.slot_mapping.fill_(-1)
        self.model_pass.capture(mode, has_round_graphs=not self._has_adapters)
        if not self._has_adapters:  # LoRA layers decide on the host before each pass what to launch
            for graphed_round in (*self._passes.values(), *self._logits.values()):
                graphed_round.capture(mode)

    def begin(self, batch: BatchV2, slots: list[Slot], owners: list[Owner]) -> None:
        """Begin a proposal: activate adapters and lay out the rows' block tables."""
        self.model_pass.begin(batch.request_ids)
        if batch.position_deltas is not None:
            deltas = np.repeat(batch.position_deltas, self.model_pass.inputs.query_len)
            on_device = async_tensor_h2d(deltas, self._context.device, torch.int64)
            self.model_pass.inputs.position_deltas[: len(deltas)].copy_(on_device)
        self.selections.begin(batch, self._chunks(batch), slots, owners)
        if self.pool is not None:
            self.pool.begin()
        if self._recurrent is not None:
            self._recurrent.begin(batch)

    def _chunks(self, batch: BatchV2) -> torch.Tensor:  # [num_rows, width], int32
        """Write the chunks of the rows' blocks in the retrieving group."""
        blocks = batch.tables[self._sparse_index]
        if self._split == 1:
            return blocks
        chunks = self.selections.chunk_tables[: len(blocks)].unflatten(1, (-1, self._split))
        return torch.add(self._parts, blocks[:, :, None], alpha=self._split, out=chunks).flatten(1)

    def forward(self, sampling: SamplingV2, may_select: bool = True) -> LevelLogits:
        """Return logits after each row's newest token and each draft, ``gamma + 1`` places.

        They are valid until the next pass.

        Args:
            may_select: False if no row selects chunks in this pass.
        """
        self._passes[may_select](sampling)
        best, top, *masked = self._logits[sampling.kind](sampling)
        distributions = None if sampling.all_greedy else Distributions(*masked)
        return LevelLogits(best, top, distributions)

    def _run_without_selection(self, sampling: SamplingV2) -> tuple[()]:
        selection, self._selection = self._selection, None
        try:
            return self._run_pass(sampling)
        finally:
            self._selection = selection

    def _run_pass(self, sampling: SamplingV2) -> tuple[()]:
        rows = self._rows
        prepare_target_inputs(
            rows,
            self.model_pass.inputs,
            self.model_pass.padded_rows(rows.num_rows),
            self.selections.chunk_tables,
            self._dense_seq_lens,
            self._sparse_group.block_size // self._split,
            self._max_position,
            self.pool,
        )
        if self._recurrent is not None:
            self._recurrent.begin_pass()
        self.model_pass.run(rows.num_rows)
        if self._hidden_states is not None:
            self._hidden_states.add_pass(self.model_pass.states, self.model_pass.inputs)
        return ()

    def _compute_logits(self, sampling: SamplingV2) -> tuple[torch.Tensor, ...]:
        """Return the fields of ``LevelLogits``, and of its distributions unless all are greedy."""
        rows = self._rows
        hidden = self.model_pass.hidden(rows.num_rows)
        logits = self._model.compute_logits(hidden.flatten(0, 1))
        if sampling.has_processors:
            logits = self._context.logits_processing.apply(logits, first_place=0)
        logits = logits.to(self._context.logits_dtype).unflatten(0, hidden.shape[:2])
        top, best = logits.max(-1)
        if sampling.all_greedy:
            return best, top
        masks = row_masks(sampling, rows, logits.shape[1])
        masked, lse = masked_logits(logits.flatten(0, 1), *masks)
        return best, top, masked.view(logits.shape), lse.view(logits.shape[:2])

    def scrub(self, batch: BatchV2) -> None:
        """Replace NaNs in the lookahead slots of rows whose logits had one."""
        rows = self._rows
        max_written = rows.num_speculative_tokens + rows.gamma
        for scrubber, table in zip(self._scrubbers, batch.tables):
            if scrubber is not None:
                scrubber(rows, table, max_written)
        if self.pool is not None:
            self.pool.clean()

    def _metadata(self, num_rows: int) -> dict:
        inputs, heads = self.model_pass.inputs, self._attention.num_kv_heads
        tables = [table[: num_rows * heads] for table in self.selections.tables]
        if self.pool is not None:
            first = len(tables) - self.pool.num_layers
            tables[first:] = [self.pool.tables[: num_rows * heads]] * self.pool.num_layers
        sparse = self._attention.uniform(
            num_rows,
            inputs.query_len,
            inputs.seq_lens[: num_rows * heads],
            tables,
            self._selection,
        )
        metadata = dict(zip(self._sparse_group.sparse_layer_names, sparse))
        for dense in self._dense:
            metadata |= dict.fromkeys(dense.names, dense.metadata(num_rows))
        if self._recurrent is not None:
            metadata |= dict.fromkeys(self._recurrent.layers, self._recurrent.metadata(num_rows))
        return metadata

    def _slots(self, num_rows: int) -> dict[str, torch.Tensor]:
        inputs = self.model_pass.inputs
        mapping = inputs.slot_mapping[: num_rows * inputs.query_len]
        slots = dict.fromkeys(self._sparse_group.sparse_layer_names, mapping)
        for dense in self._dense:
            slots |= dict.fromkeys(dense.names, dense.slots(num_rows))
        if self.pool is not None:
            pool_mapping = self.pool.slot_mapping[: num_rows * inputs.query_len]
            slots |= dict.fromkeys(self._pooled_names, pool_mapping)
        return slots
