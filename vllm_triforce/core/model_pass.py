"""Forward pass of a vLLM model outside the scheduler's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.vllm_patches.stock_behavior import hidden_kv_connector


@dataclass
class PassInput:
    """Inputs of a ragged batch, its rows concatenated."""

    token_ids: torch.Tensor  # [num_tokens], int32
    positions: torch.Tensor  # [num_tokens], int64
    query_lens: torch.Tensor  # [num_rows], int32
    query_start_loc: torch.Tensor  # [num_rows + 1], int32
    seq_lens: torch.Tensor  # [num_rows], int32, cached tokens and tokens of this pass
    spans: list[tuple[int, int]]
    """Each row's positions, as ``(first, last + 1)``."""

    @classmethod
    def from_rows(
        cls, rows: list[list[int]], first_positions: list[int], device: torch.device | None = None
    ) -> "PassInput":
        # Lists: on a CPU a tensor operation costs more than a loop over a few numbers.
        spans = [(first, first + len(row)) for row, first in zip(rows, first_positions)]

        def tensor(values, dtype):
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            tensor(chain.from_iterable(rows), torch.int32),
            tensor(chain.from_iterable(range(*span) for span in spans), torch.int64),
            tensor(map(len, rows), torch.int32),
            tensor(accumulate(map(len, rows), initial=0), torch.int32),
            tensor((end for _, end in spans), torch.int32),
            spans,
        )

    def slot_mapping(
        self,
        block_ids: Sequence[np.ndarray],  # of each row
        block_size: int,
    ) -> torch.Tensor:  # [num_tokens], int64
        slots = [
            int(blocks[position // block_size]) * block_size + position % block_size
            for blocks, span in zip(block_ids, self.spans)
            for position in range(*span)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=self.positions.device)

    def common_metadata(
        self, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Build the common metadata for vLLM's metadata builders."""
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc.cpu(),
            seq_lens=self.seq_lens,
            num_reqs=len(self.query_lens),
            num_actual_tokens=len(self.token_ids),
            max_query_len=int(self.query_lens.max()),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            causal=True,
            positions=self.positions,
        )


def target_inputs(
    model: Any,
    vllm_config,
    token_ids: torch.Tensor,  # [num_tokens], of text
    positions: torch.Tensor,  # [num_tokens], in the request
    position_deltas: torch.Tensor | int = 0,  # [num_tokens]
) -> dict[str, torch.Tensor | None]:
    """Return the inputs of a target's pass in the form of vLLM's runners.

    vLLM compiles the target for that form: embeddings where the target takes images, audio or
    video, and with M-RoPE a row of positions for each dimension. Rows are equal after the prompt.

    Args:
        model: the target, or its copy; ``vllm_config`` is its own.
        position_deltas: M-RoPE positions minus positions in the request.
    """
    model_config = vllm_config.model_config
    inputs: dict[str, torch.Tensor | None] = {"input_ids": token_ids}
    if model_config.supports_multimodal_inputs:
        is_multimodal = torch.zeros_like(token_ids, dtype=torch.bool)
        inputs["inputs_embeds"] = model.embed_input_ids(
            token_ids, multimodal_embeddings=[], is_multimodal=is_multimodal
        )
        if not requires_raw_input_tokens(model):
            inputs["input_ids"] = None
    if model_config.uses_mrope:
        # Padding has deltas of other requests. The strides are those of vLLM's buffer.
        text = (positions + position_deltas).clamp_(min=0)
        stride = vllm_config.scheduler_config.max_num_batched_tokens + 1
        shape = model_config.mrope_num_dims, len(text)
        positions = torch.empty_strided(shape, (stride, 1), dtype=text.dtype, device=text.device)
        positions.copy_(text)
    return {**inputs, "positions": positions}


def run_model(
    model: torch.nn.Module,
    vllm_config,
    inputs: PassInput,
    attn_metadata: dict | None,
    slot_mapping: dict[str, torch.Tensor],
    **more: torch.Tensor | None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Run a model over a ragged batch with ``more`` inputs, or ``target_inputs()``."""
    given = {"input_ids": inputs.token_ids, "positions": inputs.positions, **more}
    return forward(model, vllm_config, len(inputs.token_ids), given, attn_metadata, slot_mapping)


def forward(
    model: torch.nn.Module,
    vllm_config,
    num_tokens: int,
    inputs: dict[str, torch.Tensor | None],
    attn_metadata: dict | None,
    slot_mapping: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Run a model's forward pass, hidden from KV connectors.

    Returns:
        Hidden states, [num_tokens, hidden_size], and the model's other outputs: the states of a
        target's auxiliary layers, or those that an EAGLE-3 head feeds back.
    """
    context = set_forward_context(
        attn_metadata, vllm_config, num_tokens=num_tokens, slot_mapping=slot_mapping
    )
    with hidden_kv_connector(), context:
        output = model(**inputs)
    if not isinstance(output, tuple):
        return output, ()
    hidden, further = output
    return hidden, [further] if isinstance(further, torch.Tensor) else further
