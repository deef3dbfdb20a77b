"""What requests ask of their logits, for level 1's and level 2's: what they draft is then what the
full pass will accept.

vLLM's own states and kernels, as its sampler applies them to the full pass's logits
(vllm/v1/worker/gpu/sample/): ``logit_bias``, ``allowed_token_ids`` and ``min_tokens``, then
penalties. Nothing runs where nobody in the batch asks for any.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties

from vllm_triforce.device.batch import LogitShaping
from vllm_triforce.kernels.feeding import PassInputs
from vllm_triforce.kernels.rows import Rows

# Of vLLM's context, what biases do not depend on.
_UNREAD: Any = None


def logit_shaping(
    sampler,
    states,  # [num_rows], int, on the host
    on_device: torch.Tensor,  # [num_rows], int64, the same
) -> LogitShaping | None:
    """What the requests of a proposal's rows ask of their logits; None where none does.

    Args:
        sampler: the runner's.
    """
    bias = next(its for its in sampler.logits_processors if isinstance(its, LogitBiasState))
    penalties = sampler.penalties_state
    has_bias = bias.use_logit_bias[states].any()
    has_penalties = penalties.use_penalty[states].any()
    if not has_bias and not has_penalties:
        return None
    return RowShaping(
        _RowBias(bias, states, on_device) if has_bias else None,
        _RowPenalties(penalties, on_device) if has_penalties else None,
    )


class RowShaping(LogitShaping):
    """One proposal's.

    Of level 1's logits it leaves out the penalties, which would have to count what it has drafted:
    its tokens may be any.
    """

    def __init__(self, bias: "_RowBias | None", penalties: "_RowPenalties | None") -> None:
        self._bias, self._penalties = bias, penalties

    def shape_drafts(self, logits, positions):
        if self._bias is None:
            return logits
        return self._bias(logits.float(), positions)

    def shape_target(self, logits, inputs, rows):
        flat = logits.flatten(0, 1).float()
        num_tokens = len(flat)
        if self._bias is not None:
            flat = self._bias(flat, inputs.positions[:num_tokens])
        if self._penalties is not None:
            self._penalties(flat, inputs, rows)
        return flat.view(logits.shape)


class _RowBias:
    """Biases, allowed tokens, and no end before ``min_tokens``: by vLLM's state of each request."""

    def __init__(self, state: LogitBiasState, states, on_device: torch.Tensor) -> None:
        self._state, self._states, self._on_device = state, states, on_device.int()

    def __call__(
        self,
        logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, may be changed
        positions: torch.Tensor,  # [num_rows * query_len], int64, of the tokens that were fed
    ) -> torch.Tensor:
        query_len = len(logits) // len(self._on_device)
        context = LogitsContext(
            expanded_idx_mapping=self._on_device.repeat_interleave(query_len),
            idx_mapping=self._on_device,
            idx_mapping_np=self._states,
            expanded_local_pos=_UNREAD,
            input_ids=_UNREAD,
            pos=positions,
            seq_lens_upper_bound_np=_UNREAD,
        )
        return self._state.apply(logits, context)


class _RowPenalties:
    """Penalties, which count a request's output and what is proposed for it.

    vLLM's kernel adds the tokens of the present pass to the output's counts; those of a proposal's
    earlier rounds are added here, in a copy by row.
    """

    def __init__(self, state: PenaltiesState, on_device: torch.Tensor) -> None:
        self._repetition = state.repetition_penalty.gpu[on_device]
        self._frequency = state.frequency_penalty.gpu[on_device]
        self._presence = state.presence_penalty.gpu[on_device]
        self._in_prompt = state.prompt_bin_mask[on_device]
        self._counts = state.output_bin_counts[on_device]  # [num_rows, vocab_size]
        self._num_counted = torch.zeros_like(on_device)  # tokens of each row's proposal

    def __call__(
        self,
        logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, changed
        inputs: PassInputs,
        rows: Rows,
    ) -> None:
        count = rows.num_rows
        self._count_proposals(rows.proposal[:count], rows.length[:count])
        owners = torch.arange(count, dtype=torch.int32, device=logits.device)
        places = torch.arange(inputs.query_len, dtype=torch.int32, device=logits.device)
        apply_penalties(
            logits,
            owners.repeat_interleave(inputs.query_len),
            inputs.token_ids[: len(logits)],
            places.repeat(count),
            self._repetition,
            self._frequency,
            self._presence,
            self._in_prompt,
            self._counts,
        )

    def _count_proposals(
        self,
        proposal: torch.Tensor,  # [num_rows, num_speculative_tokens], int64
        length: torch.Tensor,  # [num_rows], int32
    ) -> None:
        """Adds the tokens that were proposed since the last pass."""
        places = torch.arange(proposal.shape[1], device=proposal.device)
        is_new = (places >= self._num_counted[:, None]) & (places < length[:, None])
        self._counts.scatter_add_(1, proposal, is_new.int())
        self._num_counted = length.to(torch.int64)  # a copy: lengths grow in place
