"""Gated delta nets in level 2's passes: recurrent states apart from the full pass's."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm_triforce.core.kv_groups import KVGroup, own_states
from vllm_triforce.kernels.recurrent_states import StateViews
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2


class RecurrentLayers:
    """Layers of level 2 that carry a state from token to token, with states of their own.

    vLLM's full pass leaves the state after each token of a proposal, and the next one resumes from
    the last accepted token's (vllm/v1/attention/backends/gdn_attn.py). Level 2's passes do the same
    with ``gamma + 1`` states a row. The first pass of a proposal resumes from a copy of the full
    pass's accepted state, which a pass of level 2 never writes.

    The state of row ``r`` after token ``t`` of a pass is number ``1 + t * max_rows + r``. Number 0
    is vLLM's null block, which its kernels skip.

    Args:
        layers: the target's, by name.
        level2_layers: the same layers of level 2's model, which is the target or its copy.
        model_state: the runner's ``MambaHybridModelState``.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        level2_layers: Mapping[str, Any],
        groups: list[KVGroup],
        rows: Rows,
        model_state: Any,
        device: torch.device,
    ) -> None:
        self._rows, self._model_state = rows, model_state
        self._query_len = length = rows.gamma + 1
        self._groups = [i for i, group in enumerate(groups) if group.recurrent_layer_names]
        self.layers = {name: self._with_own_states(level2_layers[name], device) for name in layers}
        """By name, with level 2's states in the place of the full pass's."""
        in_group = {
            name: index
            for index, group in enumerate(self._groups)
            for name in groups[group].recurrent_layer_names
        }
        self._group_of = torch.tensor(
            [in_group[name] for name in layers], dtype=torch.int32, device=device
        )
        pairs = [(layers[name].kv_cache, own.kv_cache) for name, own in self.layers.items()]
        views = [
            StateViews([of(cache[kind]) for cache, _ in pairs], [of(own[kind]) for _, own in pairs])
            for kind, of in enumerate((_by_token, _as_one_row))
        ]
        self._conv_states, self._states = views
        first = next(iter(layers.values()))
        self._conv_tokens = first.conv_kernel_size - 1
        max_rows, shape = rows.max_rows, (2, len(self._groups), rows.max_rows)
        self._blocks = torch.zeros(shape, dtype=torch.int64, device=device)
        """Blocks of the full pass's convolutions and states to copy, by group and row."""
        self._first_tokens = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self._num_accepted = torch.ones(max_rows, dtype=torch.int32, device=device)
        numbers = torch.arange(length * max_rows, dtype=torch.int32, device=device) + 1
        self._state_numbers = numbers.view(length, max_rows).T.contiguous()
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device) * length
        self._tokens = torch.arange(max_rows * length, dtype=torch.int32, device=device)
        self._masks = torch.ones(max_rows, dtype=torch.bool, device=device)
        self._masks_cpu = torch.ones(max_rows, dtype=torch.bool)

    def _with_own_states(self, layer: Any, device: torch.device) -> Any:
        """Return a copy of a layer that shares its weights and has states of its own."""
        own = copy.copy(layer)
        own.kv_cache = tuple(
            torch.zeros(1 + count * self._rows.max_rows, *shape, dtype=dtype, device=device)
            for count, shape, dtype in own_states(layer, self._query_len)
        )
        return own

    def config(self, vllm_config: Any) -> Any:
        """Return a config under which level 2's passes find these layers by their names."""
        config = copy.copy(vllm_config)
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        context = {**config.compilation_config.static_forward_context, **self.layers}
        config.compilation_config.static_forward_context = context
        return config

    def begin(self, batch: BatchV2) -> None:
        """Copy the rows' accepted states, from which the first pass resumes."""
        num_rows, state = len(batch), self._model_state
        rows = self._rows.column(RowColumn.STATE).long()
        accepted = state.num_accepted_tokens_gpu[rows] - 1
        first = torch.zeros_like(accepted)
        if state._align_mode:  # with prefix caching states have blocks like tokens
            first = state._mamba_state_idx_gpu[rows]
        # The convolution's block holds the tokens of all places.
        columns = torch.stack([first, first + accepted]).long()
        for index, group in enumerate(self._groups):
            found = batch.tables[group].expand(2, -1, -1).gather(2, columns[:, :, None])
            self._blocks[:, index, :num_rows] = found[:, :, 0]
        self._first_tokens[0, :num_rows] = accepted
        views = (self._conv_states, self._conv_tokens), (self._states, 1)
        for blocks, first_tokens, (states, num_tokens) in zip(
            self._blocks, self._first_tokens, views
        ):
            states.copy(blocks, self._group_of, first_tokens, num_tokens, num_rows)

    def begin_pass(self) -> None:
        """Resume from the last token that the row's last round has added, part of a graph."""
        rows = self._rows
        torch.clamp(rows.num_emitted, min=1, out=self._num_accepted)
        self._num_accepted.masked_fill_(rows.length == 0, 1)

    def metadata(self, num_rows: int) -> GDNAttentionMetadata:
        num_tokens = num_rows * self._query_len
        return GDNAttentionMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=num_rows,
            num_spec_decode_tokens=num_tokens,
            num_actual_tokens=num_tokens,
            spec_query_start_loc=self._starts[: num_rows + 1],
            spec_state_indices_tensor=self._state_numbers[:num_rows],
            spec_sequence_masks=self._masks[:num_rows],
            spec_sequence_masks_cpu=self._masks_cpu[:num_rows],
            spec_token_indx=self._tokens[:num_tokens],
            non_spec_token_indx=self._tokens[:0],
            num_accepted_tokens=self._num_accepted[:num_rows],
            uniform_spec_sequence_length=self._query_len,
        )


def _by_token(convolution: torch.Tensor) -> torch.Tensor:  # [num_states, num_tokens, size]
    return convolution.transpose(1, 2) if is_conv_state_dim_first() else convolution


def _as_one_row(states: torch.Tensor) -> torch.Tensor:  # [num_states, 1, size]
    return states.flatten(1).unsqueeze(1)
