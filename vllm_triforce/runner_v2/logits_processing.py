"""Logits processors of requests, applied to the logits of levels 1 and 2.

Drafts then follow the distribution that the full pass samples from. The order is that of vLLM's
sampler (vllm/v1/worker/gpu/sample/sampler.py), and so are the states. vLLM's kernel applies
``logit_bias``, ``allowed_token_ids`` and ``min_tokens``. Penalties and ``bad_words`` depend on
earlier tokens, so kernels of ours apply them, which also read the proposal. Nothing runs if no
request of the batch has a processor.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState, apply_logit_bias
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_triforce.kernels.logits_processing import apply_penalties, forbid_bad_words
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows

# vLLM's processors that are applied here, in its order.
_PROCESSORS = [LogitBiasState, PenaltiesState, BadWordsState]


class LogitsProcessing:
    """Logits processors of the requests of a proposal's rows, by the states of vLLM's runner.

    Raises:
        RuntimeError: the sampler has other processors, or another order.
    """

    def __init__(self, sampler, req_states, rows: Rows) -> None:
        states = sampler.logits_processors[: len(_PROCESSORS)]
        if [type(state) for state in states] != _PROCESSORS:
            names, expected = (
                [cls.__name__ for cls in classes] for classes in (map(type, states), _PROCESSORS)
            )
            raise RuntimeError(
                f"vLLM's sampler changes logits by {names}, TriForce knows of {expected} in this "
                "order; it is made for another vLLM"
            )
        self._bias, self._penalties, self._bad_words = states
        self._req_states = req_states
        self._rows = rows
        bias, penalties = self._bias, self._penalties
        self._moving = (
            bias.num_allowed_token_ids,
            bias.num_logit_bias,
            bias.min_lens,
            bias.num_stop_token_ids,
            bias.restore_when_all_masked,
            req_states.prompt_len,
            self._bad_words.num_bad_words,
            penalties.repetition_penalty,
            penalties.frequency_penalty,
            penalties.presence_penalty,
        )
        """Parameters by state, int32 or float32, which vLLM writes to another buffer each step
        (vllm/v1/worker/gpu/buffer_utils.py)."""
        shape = (len(self._moving), len(bias.use_logit_bias))
        self._kept = torch.zeros(shape, dtype=torch.int32, device=rows.table.device)
        """[10, max_num_reqs], their copies, at addresses that graphs can rely on."""
        *self._bias_parameters, self._prompt_len, self._num_bad_words = self._kept[:7]
        self._penalty_parameters = self._kept[7:].view(torch.float32)

    def is_needed(self, states: np.ndarray) -> bool:
        """True if one of the requests, by state, has a processor."""
        return bool(
            self._bias.use_logit_bias[states].any()
            or self._penalties.use_penalty[states].any()
            or self._bad_words.num_bad_words.np[states].any()
        )

    def begin(self) -> None:
        """Copy the parameters of all requests, once a proposal."""
        torch.stack([each.gpu.view(torch.int32) for each in self._moving], out=self._kept)

    def apply(
        self,
        logits: torch.Tensor,  # [num_rows * query_len, vocab_size]
        first_place: int,  # n follows the proposal so far and n drafts of the round
    ) -> torch.Tensor:  # float32; may be ``logits``, modified in place
        """Apply the processors; only launches kernels, so that a CUDA graph can capture it."""
        rows, bias, penalties, words = self._rows, self._bias, self._penalties, self._bad_words
        logits, query_len = logits.float(), len(logits) // rows.num_rows
        num_allowed, num_biases, min_len, num_stop, restores = self._bias_parameters
        newest = rows.computed[: rows.num_rows] + rows.length[: rows.num_rows]
        offsets = torch.arange(
            first_place, first_place + query_len, dtype=torch.int64, device=logits.device
        )
        apply_logit_bias(  # to a graph's padding rows too
            logits,
            rows.column(RowColumn.STATE).repeat_interleave(query_len, output_size=len(logits)),
            (newest[:, None] + offsets).flatten(),
            num_allowed,
            bias.allowed_token_ids.gpu,
            num_biases,
            bias.logit_bias_token_ids.gpu,
            bias.logit_bias.gpu,
            min_len,
            num_stop,
            restores,
            bias.stop_token_ids.gpu,
            check_all_masked_rows=True,
        )
        apply_penalties(
            logits,
            query_len,
            first_place,
            rows,
            self._penalty_parameters,
            penalties.prompt_bin_mask,
            penalties.output_bin_counts,
        )
        forbid_bad_words(
            logits,
            query_len,
            first_place,
            rows,
            self._prompt_len,
            self._num_bad_words,
            words.bad_word_token_ids.gpu,
            words.bad_word_offsets.gpu,
            self._req_states.all_token_ids.gpu,
        )
        return logits
