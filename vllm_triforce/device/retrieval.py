"""Level 2 on the device: the target's own weights over the retrieval cache (paper, 4.2)."""

from typing import TYPE_CHECKING

import torch

from vllm_triforce.attention.base import RetrievalAttention
from vllm_triforce.core.kv_groups import KVGroup
from vllm_triforce.device.adapters import PassAdapters
from vllm_triforce.device.batch import (
    CAPTURED_SAMPLING,
    DeviceBatch,
    DeviceSampling,
    LogitShaping,
    Masks,
)
from vllm_triforce.device.dense_layers import DenseLayers
from vllm_triforce.device.model_pass import ModelPass
from vllm_triforce.device.row_work import RowWork
from vllm_triforce.device.selections import DeviceSelections
from vllm_triforce.device.slots import Slot
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.faults import BlockCleaner
from vllm_triforce.kernels.row_metadata import Refresh
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.verification.masked_logits import masked_logits

if TYPE_CHECKING:
    from vllm_triforce.offload.pool import RetrievalPool


class DeviceRetrieval:
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
        selections: DeviceSelections,
        rows: Rows,
        max_position: int,
        tables: list[torch.Tensor],
        logits_dtype: torch.dtype,
        shaping: LogitShaping,
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
        self._batch: DeviceBatch | None = None
        self._pool = pool
        names = groups[self._sparse_group].sparse_layer_names
        self._pooled = set() if pool is None else set(names[-pool.num_layers :])
        layers = vllm_config.compilation_config.static_forward_context
        self._cleaners: list[BlockCleaner | None] = []
        for group in groups:
            names = group.sparse_layer_names + group.dense_layer_names
            caches = [layers[name].kv_cache for name in names if name not in self._pooled]
            cleaner = BlockCleaner(caches, group.block_size, device) if caches else None
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
            sampling.kind: RowWork(
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

    def begin(self, batch: DeviceBatch, slots: list[Slot], due: list[Refresh]) -> None:
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

    def _forward(self, sampling: DeviceSampling) -> tuple[torch.Tensor, ...]:
        """The fields of ``LevelLogits`` and of its distributions, if any."""
        rows = self._rows
        group = self._groups[self._sparse_group]
        rows.feed_target(
            self._pass.inputs,
            self._pass.padded_rows(rows.num_rows),
            self._table,
            self._dense_seq_lens,
            group.block_size,
            self._max_position,
            self._num_kv_heads,
            *(() if self._pool is None else (self._pool.slot_mapping, self._pool.width)),
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
                cleaner(rows.faults, rows.num_rows, rows.computed, table, reach)
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
