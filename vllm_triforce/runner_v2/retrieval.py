"""Level 2's passes in layers that retrieval does not fit, as those with a sliding window.

Level 2 on the device: the target's own weights over the retrieval cache (paper, 4.2).
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.attention.base import RetrievalAttention
from vllm_triforce.core.kv_groups import KVGroup
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.pass_inputs import PassInputs, prepare_target_inputs
from vllm_triforce.kernels.row_table import Refresh
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import (
    CAPTURED_SAMPLING,
    BatchV2,
    Masks,
    RowLogitsProcessor,
    SamplingV2,
)
from vllm_triforce.runner_v2.passes import GraphedRound, ModelPass, PassAdapters
from vllm_triforce.runner_v2.sampling import masked_logits
from vllm_triforce.runner_v2.selections import SelectionsV2
from vllm_triforce.runner_v2.slots import Slot


class DenseLayers:
    """Those of one KV cache group: they read what they would read in a full pass.

    All that they are given lies in buffers that stay where they are.

    Args:
        inputs: of level 2's pass.
        seq_lens: [max_rows], int32, tokens of each row once the pass is over.
        table: [max_rows, width], int32, the rows' block tables in this group.
        max_seq_len: that the target knows.
    """

    def __init__(
        self,
        group: KVGroup,
        inputs: PassInputs,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_seq_len: int,
    ) -> None:
        self.names = group.dense_layer_names
        self._builder: Any = group.dense_builder
        self._block_size = group.block_size
        self._inputs = inputs
        self._seq_lens = seq_lens
        self._table = table
        self._max_seq_len = max_seq_len
        self._starts_on_host = torch.arange(len(seq_lens) + 1, dtype=torch.int32) * inputs.query_len
        self._starts = self._starts_on_host.to(seq_lens.device)
        owners = torch.arange(len(seq_lens), device=seq_lens.device)
        self._owners = owners.repeat_interleave(inputs.query_len)
        self._slot_mapping = torch.empty_like(inputs.slot_mapping)

    def slots(self, num_rows: int) -> torch.Tensor:  # [num_rows * query_len], int64
        """Where this group's blocks have the places of ``inputs.slot_mapping``: -1 for none."""
        num_tokens = num_rows * self._inputs.query_len
        positions = self._inputs.positions[:num_tokens]
        size = self._block_size
        blocks = self._table[self._owners[:num_tokens], positions // size].to(torch.int64)
        places = blocks * size + positions % size
        own = self._inputs.slot_mapping[:num_tokens]
        return torch.where(own < 0, own, places, out=self._slot_mapping[:num_tokens])

    def metadata(self, num_rows: int) -> Any:
        """The backend's own. What the builder makes of it on the device belongs to the pass."""
        length = self._inputs.query_len
        num_tokens = num_rows * length
        common = CommonAttentionMetadata(
            query_start_loc=self._starts[: num_rows + 1],
            query_start_loc_cpu=self._starts_on_host[: num_rows + 1],
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


if TYPE_CHECKING:
    from vllm_triforce.offload.pool import RetrievalPool


class RetrievalLevelV2:
    """Verifies drafts in one sparse pass of the target, of ``gamma + 1`` tokens for every row.

    It writes KV into the lookahead slots that the scheduler reserved; the full pass writes the
    same slots again, so nothing approximate survives. Rows that have nothing to verify take part
    and write nothing.

    Args:
        groups: vLLM's KV cache groups; the sparse layers are all in one of them.
        max_position: last position that the target knows.
        tables: of each group, [max_rows, width], int32: where each batch's block tables are.
        logits_dtype: of the logits from which is drawn.
        shaping: of the logits of batches whose ``sampling.is_shaped``.
        adapters: None where the engine has no LoRA.
        pool: of the layers whose KV cache lies in host memory, which are the last; None where
            there are none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config,
        groups: list[KVGroup],
        attention: RetrievalAttention,
        selections: SelectionsV2,
        rows: Rows,
        max_position: int,
        tables: list[torch.Tensor],
        logits_dtype: torch.dtype,
        shaping: RowLogitsProcessor,
        device: torch.device,
        adapters: PassAdapters | None = None,
        pool: "RetrievalPool | None" = None,
    ) -> None:
        self._model = model
        self._groups = groups
        self._sparse_group = next(i for i, g in enumerate(groups) if g.sparse_layer_names)
        self._attention = attention
        self.selections = selections
        self._rows = rows
        self._max_position = max_position
        self._num_kv_heads = attention.num_kv_heads
        self._dense_seq_lens = torch.zeros(rows.max_rows, dtype=torch.int32, device=device)
        self._table = tables[self._sparse_group]
        self._logits_dtype = logits_dtype
        self._shaping = shaping
        self._batch: BatchV2 | None = None
        self._pool = pool
        names = groups[self._sparse_group].sparse_layer_names
        self._pooled = set() if pool is None else set(names[-pool.num_layers :])
        layers = vllm_config.compilation_config.static_forward_context
        self._cleaners: list[NanScrubber | None] = []
        for group in groups:
            names = group.sparse_layer_names + group.dense_layer_names
            caches = [layers[name].kv_cache for name in names if name not in self._pooled]
            cleaner = NanScrubber(caches, group.block_size, device) if caches else None
            self._cleaners.append(cleaner)
        config = vllm_config.model_config
        self._pass = ModelPass(
            model,
            vllm_config,
            rows.max_rows,
            rows.gamma + 1,
            rows.max_rows * self._num_kv_heads,
            config.get_hidden_size(),
            config.dtype,
            device,
            self._metadata,
            self._slots,
            "level 2 pass",
            adapters,
        )
        self._dense = [
            DenseLayers(group, self._pass.inputs, self._dense_seq_lens, table, max_position + 1)
            for group, table in zip(groups, tables)
            if group.dense_layer_names
        ]
        self._has_adapters = adapters is not None
        self._rounds = {
            sampling.kind: GraphedRound(
                self._forward,
                sampling,
                rows,
                [self._pass],
                vllm_config,
                device,
                f"level 2 round, {sampling.kind}",
            )
            for sampling in CAPTURED_SAMPLING
        }

    @property
    def can_capture(self) -> bool:
        """Whether what layers that stay dense are given is the same for every pass."""
        builders = (group.dense_builder for group in self._groups if group.dense_layer_names)
        return all(map(self._attention.has_static_metadata, builders))

    def capture(self, mode) -> None:
        if not self.can_capture:
            return
        if self._pool is not None:
            self._pool.slot_mapping.fill_(-1)
        self._pass.capture(mode, has_rounds=not self._has_adapters)
        if not self._has_adapters:  # whose layers are told before each pass what to launch
            for its in self._rounds.values():
                its.capture(mode)

    def begin(self, batch: BatchV2, slots: list[Slot], due: list[Refresh]) -> None:
        self._batch = batch
        self._pass.begin(batch.request_ids)
        self.selections.refresh(batch, batch.tables[self._sparse_group], slots, due)
        if self._pool is not None:
            self._pool.begin(self.selections.tables)

    def forward(self) -> LevelLogits:
        """Logits after each row's newest token and after each of its drafts, ``gamma + 1``
        places; valid until the next pass."""
        sampling = self._batch.sampling
        best, top, *drawn = self._rounds[sampling.kind](sampling)
        distributions = None if sampling.all_greedy else Distributions(*drawn)
        return LevelLogits(best, top, distributions)

    def _forward(self, sampling: SamplingV2) -> tuple[torch.Tensor, ...]:
        """The fields of ``LevelLogits`` and of its distributions, if any."""
        rows = self._rows
        group = self._groups[self._sparse_group]
        prepare_target_inputs(
            rows,
            self._pass.inputs,
            self._pass.padded_rows(rows.num_rows),
            self._table,
            self._dense_seq_lens,
            group.block_size,
            self._max_position,
            self._pool,
        )
        hidden = self._pass.run(rows.num_rows)
        logits = self._model.compute_logits(hidden.flatten(0, 1))
        if sampling.is_shaped:
            logits = self._shaping.shape(logits, first_place=0)
        logits = logits.to(self._logits_dtype).unflatten(0, hidden.shape[:2])
        top, best = logits.max(-1)
        if sampling.all_greedy:
            return best, top
        masks = Masks(sampling, rows, logits.shape[1])
        masked, lse = masked_logits(logits.flatten(0, 1), masks)
        return best, top, masked.view(logits.shape), lse.view(logits.shape[:2])

    def clean(self) -> None:
        """Removes NaN from the lookahead slots of the rows that have a fault."""
        rows = self._rows
        reach = rows.num_speculative_tokens + rows.gamma
        for cleaner, table in zip(self._cleaners, self._batch.tables):
            if cleaner is not None:
                cleaner(rows, table, reach)
        if self._pool is not None:
            self._pool.clean()

    def _metadata(self, num_rows: int) -> dict:
        inputs, heads = self._pass.inputs, self._num_kv_heads
        group = self._groups[self._sparse_group]
        tables = [
            (self._pool.tables if name in self._pooled else own)[: num_rows * heads]
            for name, own in zip(group.sparse_layer_names, self.selections.tables)
        ]
        sparse = self._attention.uniform(
            num_rows, inputs.query_len, inputs.seq_lens[: num_rows * heads], tables
        )
        metadata = dict(zip(group.sparse_layer_names, sparse))
        for dense in self._dense:
            metadata |= dict.fromkeys(dense.names, dense.metadata(num_rows))
        return metadata

    def _slots(self, num_rows: int) -> dict[str, torch.Tensor]:
        inputs = self._pass.inputs
        own = inputs.slot_mapping[: num_rows * inputs.query_len]
        slots = dict.fromkeys(self._groups[self._sparse_group].sparse_layer_names, own)
        for dense in self._dense:
            slots |= dict.fromkeys(dense.names, dense.slots(num_rows))
        if self._pool is not None:
            where = self._pool.slot_mapping[: num_rows * inputs.query_len]
            slots |= dict.fromkeys(self._pooled, where)
        return slots
