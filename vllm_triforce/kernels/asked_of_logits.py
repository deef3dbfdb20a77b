"""What requests ask of their logits in numbers, where a CUDA graph finds it."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_metadata import STATE, row_value
from vllm_triforce.kernels.rows import Rows

_NUM_INTEGERS = tl.constexpr(7)
_NUM_FLOATS = tl.constexpr(3)


@triton.jit
def _keep_kernel(
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    prompt_len_ptr,  # [max_num_reqs], as all below
    num_allowed_tokens_ptr,
    num_biases_ptr,
    min_len_ptr,
    num_stop_tokens_ptr,
    restores_stop_tokens_ptr,
    num_bad_words_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    integers_ptr,  # [_NUM_INTEGERS, max_num_reqs], written
    floats_ptr,  # [_NUM_FLOATS, max_num_reqs], written
    max_num_reqs,
):
    state = row_value(row_metadata_ptr, tl.program_id(0), STATE).to(tl.int64)
    to = integers_ptr + state
    tl.store(to, tl.load(prompt_len_ptr + state))
    tl.store(to + max_num_reqs, tl.load(num_allowed_tokens_ptr + state))
    tl.store(to + 2 * max_num_reqs, tl.load(num_biases_ptr + state))
    tl.store(to + 3 * max_num_reqs, tl.load(min_len_ptr + state))
    tl.store(to + 4 * max_num_reqs, tl.load(num_stop_tokens_ptr + state))
    tl.store(to + 5 * max_num_reqs, tl.load(restores_stop_tokens_ptr + state))
    tl.store(to + 6 * max_num_reqs, tl.load(num_bad_words_ptr + state))
    to = floats_ptr + state
    tl.store(to, tl.load(repetition_ptr + state))
    tl.store(to + max_num_reqs, tl.load(frequency_ptr + state))
    tl.store(to + 2 * max_num_reqs, tl.load(presence_ptr + state))


class AskedOfLogits:
    """By state, each [max_num_reqs]: int32, and float32 for the penalties.

    vLLM keeps the same in buffers of which it takes another at every step
    (vllm/v1/worker/gpu/buffer_utils.py); these stay where they are.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._integers = torch.zeros(
            _NUM_INTEGERS.value, max_num_reqs, dtype=torch.int32, device=device
        )
        self._floats = torch.zeros(
            _NUM_FLOATS.value, max_num_reqs, dtype=torch.float32, device=device
        )
        (
            self.prompt_len,
            self.num_allowed_tokens,
            self.num_biases,
            self.min_len,
            self.num_stop_tokens,
            self.restores_stop_tokens,
            self.num_bad_words,
        ) = self._integers
        self.repetition, self.frequency, self.presence = self._floats
        # Of a state that nobody has had yet: nothing, of which 0 is another thing.
        self.repetition.fill_(1.0)

    def keep(self, rows: Rows, *of_vllm: torch.Tensor) -> None:
        """Reads what the requests of a proposal's rows ask.

        Args:
            of_vllm: its own tensors, by state, in the order of the fields above.
        """
        _keep_kernel[(rows.num_rows,)](
            rows.row_metadata,
            *of_vllm,
            self._integers,
            self._floats,
            self._integers.shape[1],
        )
