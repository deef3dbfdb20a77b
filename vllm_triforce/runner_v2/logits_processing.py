"""What requests ask of their logits, for level 1's and level 2's: what they draft is then what the
full pass will accept.

In the order of vLLM's sampler (vllm/v1/worker/gpu/sample/sampler.py), of its states:
``logit_bias``, ``allowed_token_ids`` and ``min_tokens`` by its own kernel; penalties and
``bad_words``, which look at what came before, by kernels that also see what is proposed. Nothing
runs where nobody in the batch asks for any.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState, apply_logit_bias
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_triforce.kernels.logits_processing import LogitParams, apply_penalties, forbid_bad_words
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows

# What is done here, in this order.
_STATES = [LogitBiasState, PenaltiesState, BadWordsState]


class LogitsProcessing:
    """Logits processors of the requests of a proposal's rows.

    Args:
        sampler: vLLM's.
        req_states: vLLM's, which the sampler's states refer to.

    Raises:
        RuntimeError: the sampler does something else, or in another order.
    """

    def __init__(self, sampler, req_states, rows: Rows) -> None:
        states = sampler.logits_processors[: len(_STATES)]
        if [type(state) for state in states] != _STATES:
            found, known = ([its.__name__ for its in of] for of in (map(type, states), _STATES))
            raise RuntimeError(
                f"vLLM's sampler changes logits by {found}, TriForce knows of {known} in this "
                "order; it is made for another vLLM"
            )
        self._bias, self._penalties, self._bad_words = states
        self._req_states = req_states
        self._rows = rows
        device = rows.row_metadata.device
        self._asked = LogitParams(len(self._bias.use_logit_bias), device)

    def is_needed(self, states: np.ndarray) -> bool:
        """Whether a request asks for any.

        Args:
            states: [num_rows], int.
        """
        return bool(
            self._bias.use_logit_bias[states].any()
            or self._penalties.use_penalty[states].any()
            or self._bad_words.num_bad_words.np[states].any()
        )

    def begin(self) -> None:
        """Read the parameters of the rows' requests, once a proposal."""
        bias, penalties = self._bias, self._penalties
        self._asked.keep(
            self._rows,
            self._req_states.prompt_len.gpu,
            bias.num_allowed_token_ids.gpu,
            bias.num_logit_bias.gpu,
            bias.min_lens.gpu,
            bias.num_stop_token_ids.gpu,
            bias.restore_when_all_masked.gpu,
            self._bad_words.num_bad_words.gpu,
            penalties.repetition_penalty.gpu,
            penalties.frequency_penalty.gpu,
            penalties.presence_penalty.gpu,
        )

    def apply(
        self,
        logits: torch.Tensor,  # [num_rows * query_len, vocab_size]
        first_place: int,
    ) -> torch.Tensor:  # float32; may be what was given, changed
        """Apply the processors. Only launches kernels, so that a CUDA graph can hold it.

        Args:
            logits: of ``query_len`` places of each row; what place n says follows the proposal as
                it stands and n of the round's drafts.
            first_place: of those.
        """
        rows, asked = self._rows, self._asked
        logits, query_len = logits.float(), len(logits) // rows.num_rows
        self._add_biases(logits, query_len, first_place)
        penalties, words = self._penalties, self._bad_words
        apply_penalties(
            logits,
            query_len,
            first_place,
            rows,
            asked,
            penalties.prompt_bin_mask,
            penalties.output_bin_counts,
        )
        forbid_bad_words(
            logits,
            query_len,
            first_place,
            rows,
            asked,
            words.bad_word_token_ids.gpu,
            words.bad_word_offsets.gpu,
            self._req_states.all_token_ids.gpu,
        )
        return logits

    def _add_biases(self, logits: torch.Tensor, query_len: int, first_place: int) -> None:
        """Biases, allowed tokens, and no end before ``min_tokens``; of a graph's rows that nobody
        has, too, whose logits nobody reads."""
        rows, asked, state = self._rows, self._asked, self._bias
        newest = rows.computed[: rows.num_rows] + rows.length[: rows.num_rows]
        places = torch.arange(
            first_place, first_place + query_len, dtype=torch.int64, device=logits.device
        )
        apply_logit_bias(
            logits,
            rows.column(RowColumn.STATE).repeat_interleave(query_len, output_size=len(logits)),
            (newest[:, None] + places).flatten(),
            asked.num_allowed_tokens,
            state.allowed_token_ids.gpu,
            asked.num_biases,
            state.logit_bias_token_ids.gpu,
            state.logit_bias.gpu,
            asked.min_len,
            asked.num_stop_tokens,
            asked.restores_stop_tokens,
            state.stop_token_ids.gpu,
            check_all_masked_rows=True,
        )
