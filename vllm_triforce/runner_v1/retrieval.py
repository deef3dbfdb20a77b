"""Level 2: the target, or its copy, over the retrieval cache (paper, section 4.2)."""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_triforce.attention.cpu import CPURetrievalAttention
from vllm_triforce.cache.pass_selection import PassSelection
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.budget import fit_blocks
from vllm_triforce.core.kv_groups import KVGroup, group_layers, retrieval_block_size
from vllm_triforce.core.model_pass import PassInput, run_model, target_inputs
from vllm_triforce.core.models import Level2Model, states_read
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal
from vllm_triforce.selection import POLICIES


class RetrievalLevel:
    """Computes level 2's logits of drafts in one sparse pass of the target.

    The pass writes KV into the request's lookahead slots. The full pass writes the same slots
    again, so no approximate KV survives.

    Args:
        groups: vLLM's KV cache groups; all sparse layers are in one of them.
    """

    def __init__(
        self,
        level2_model: Level2Model,
        groups: list[KVGroup],
        attention: CPURetrievalAttention,
        cache: RetrievalCache,
    ) -> None:
        self.model, self._vllm_config, _ = level2_model
        self._groups = groups
        self._sparse_group = next(i for i, g in enumerate(groups) if g.sparse_layer_names)
        self.attention = attention
        self.cache = cache
        self.max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        """Tokens of the largest full pass, for which vLLM has buffers."""
        self.before_pass: Callable[[list[str], list[int]], None] | None = None
        """Called before each pass with the request ids and the number of tokens of each."""
        self.after_pass: Callable[..., None] | None = None
        """Called after each pass with the request ids, first positions and numbers of tokens, and
        the states of the auxiliary layers, if a head reads them."""
        self.position_deltas: Callable[[list[str]], list[int]] | None = None
        """From request ids to their M-RoPE deltas, with a target that has them."""

    def invalidate_summaries(self, block_ids: tuple[list[int], ...]) -> None:
        """Invalidate the summaries of blocks that will be overwritten, by KV cache group."""
        self.cache.invalidate_summaries(block_ids[self._sparse_group])

    def begin(self, batch: DraftBatch) -> None:
        """Summarize full blocks, and lay out the block tables of the whole proposal."""
        blocks = batch.block_tables[self._sparse_group]
        selections = [
            self.cache.selection(request_id, table, num_computed)
            for request_id, table, num_computed in zip(
                batch.request_ids, blocks, batch.num_computed_tokens
            )
        ]
        max_seq_lens = [n + m for n, m in zip(batch.num_computed_tokens, batch.max_num_tokens)]
        self._sparse_tables, self._skipped = self.cache.block_table(
            selections, blocks, max_seq_lens
        )
        self.pass_selection = None
        if any(selection.summaries is not None for selection in selections):
            heads = self.attention.num_kv_heads
            self.pass_selection = PassSelection(self.cache.policy, selections, heads)

    def forward(
        self, batch: DraftBatch, proposal: Proposal, rows: list[int], drafts: list[list[int]]
    ) -> torch.Tensor:  # [sum(len(tokens) + 1 for tokens in drafts), vocab_size]
        """Compute the logits after the last token of each of ``rows`` and after each draft."""
        feed, proposed = [], [proposal.token_ids[row] for row in rows]
        for row, tokens, proposed_ids in zip(rows, drafts, proposed):
            last = proposed_ids[-1] if proposed_ids else int(batch.token_ids[row][-1])
            feed.append([last, *tokens])
        query_lens, proposed_lens = list(map(len, feed)), list(map(len, proposed))
        first_positions = [batch.num_computed_tokens[r] + n for r, n in zip(rows, proposed_lens)]
        inputs = PassInput.from_rows(feed, first_positions)
        ids = [batch.request_ids[row] for row in rows]
        if self.before_pass is not None:
            self.before_pass(ids, query_lens)
        deltas: torch.Tensor | int = 0
        if self.position_deltas is not None:
            of_rows = torch.tensor(self.position_deltas(ids))
            deltas = of_rows.repeat_interleave(inputs.query_lens)
        more = target_inputs(
            self.model, self._vllm_config, inputs.token_ids, inputs.positions, deltas
        )
        metadata: dict = {}
        slots: dict[str, torch.Tensor] = {}
        selection = None
        for group, block_tables in zip(self._groups, batch.block_tables):
            tables = [block_tables[row] for row in rows]
            mapping = inputs.slot_mapping(tables, group.block_size)
            slots |= dict.fromkeys(group.sparse_layer_names + group.dense_layer_names, mapping)
            if group.dense:
                table = pad_sequence(list(map(torch.from_numpy, tables)), batch_first=True)
                common = inputs.common_metadata(table, mapping)
            for layer_names, builder in group.dense:
                metadata |= dict.fromkeys(layer_names, builder.build(0, common))
            if group.sparse_layer_names:
                # Positions minus ``skipped`` are positions in the shortened sequences.
                skipped, sparse_tables = self._skipped, self._sparse_tables
                if len(rows) < len(batch):
                    skipped, sparse_tables = skipped[rows], sparse_tables[:, rows]
                selection = self.pass_selection
                if selection is not None and not selection.begin_pass(
                    rows, query_lens, proposed_lens, sparse_tables
                ):
                    selection = None
                sparse = self.attention.build(
                    inputs.query_lens,
                    inputs.seq_lens - skipped,
                    list(sparse_tables.flatten(1, 2)),
                    selection,
                )
                metadata |= zip(group.sparse_layer_names, sparse)
        hidden, aux = run_model(self.model, self._vllm_config, inputs, metadata, slots, **more)
        if self.after_pass is not None:
            self.after_pass(ids, first_positions, query_lens, states_read(hidden, aux))
        if selection is not None and len(rows) < len(batch):
            self._sparse_tables[:, rows] = sparse_tables  # a copy, in which the layers selected
        return self.model.compute_logits(hidden)

    def clean(self, batch: DraftBatch, row: int) -> None:
        """Remove NaN from the lookahead slots of a request.

        The full pass writes the slots again, but reads their blocks first: kernels multiply masked
        values by 0, and 0 times NaN is NaN. An fp8 cache has no NaN, since vLLM's CPU kernels
        store the largest number instead.
        """
        start = batch.num_computed_tokens[row]
        layers = self._vllm_config.compilation_config.static_forward_context
        for group, tables in zip(self._groups, batch.block_tables):
            last = (start + batch.max_num_tokens[row] - 1) // group.block_size
            blocks = tables[row][start // group.block_size : last + 1].astype(np.int64)
            ids = torch.from_numpy(blocks)
            for layer_name in group.sparse_layer_names + group.dense_layer_names:
                kv_cache = layers[layer_name].kv_cache
                kv_cache[ids] = kv_cache[ids].nan_to_num_(0.0, 0.0, 0.0)


def build_level2(
    config: ResolvedConfig,
    level2_model: Level2Model,
    target_layers: dict,
    kv_cache_config,
    attn_groups,
    block_sizes: list[int],
    dtype: torch.dtype,
) -> tuple[RetrievalLevel, ResolvedConfig]:
    """Build level 2 over the target's KV cache; its groups are those of ``group_layers()``.

    Returns:
        Level 2, and ``config`` fitted to the KV blocks of the layers that retrieve.
    """
    groups, layers, builder = group_layers(
        kv_cache_config, attn_groups, block_sizes, target_layers, CPURetrievalAttention
    )
    config = fit_blocks(config, retrieval_block_size(groups))
    attention = CPURetrievalAttention(layers, builder)
    policy = POLICIES[config.policy]()
    cache = RetrievalCache(attention, policy, config.block_size, config.budget, dtype)
    return RetrievalLevel(level2_model, groups, attention, cache), config
