"""What requests ask of their logits in numbers, where a CUDA graph finds it."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_metadata import STATE, row_value
from vllm_triforce.kernels.rows import Rows

_NUM_INTEGERS, _NUM_FLOATS = 7, 3


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
    # Of host memory, all of it asked for before the first store, which might be to the same place.
    prompt_len = tl.load(prompt_len_ptr + state)
    num_allowed_tokens = tl.load(num_allowed_tokens_ptr + state)
    num_biases = tl.load(num_biases_ptr + state)
    min_len = tl.load(min_len_ptr + state)
    num_stop_tokens = tl.load(num_stop_tokens_ptr + state)
    restores_stop_tokens = tl.load(restores_stop_tokens_ptr + state)
    num_bad_words = tl.load(num_bad_words_ptr + state)
    repetition = tl.load(repetition_ptr + state)
    frequency = tl.load(frequency_ptr + state)
    presence = tl.load(presence_ptr + state)
    to = integers_ptr + state
    tl.store(to, prompt_len)
    tl.store(to + max_num_reqs, num_allowed_tokens)
    tl.store(to + 2 * max_num_reqs, num_biases)
    tl.store(to + 3 * max_num_reqs, min_len)
    tl.store(to + 4 * max_num_reqs, num_stop_tokens)
    tl.store(to + 5 * max_num_reqs, restores_stop_tokens)
    tl.store(to + 6 * max_num_reqs, num_bad_words)
    to = floats_ptr + state
    tl.store(to, repetition)
    tl.store(to + max_num_reqs, frequency)
    tl.store(to + 2 * max_num_reqs, presence)


class AskedOfLogits:
    """By state, each [max_num_reqs]: int32, and float32 for the penalties.

    vLLM keeps the same in buffers of which it takes another at every step
    (vllm/v1/worker/gpu/buffer_utils.py); these stay where they are.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._integers = torch.zeros(_NUM_INTEGERS, max_num_reqs, dtype=torch.int32, device=device)
        self._floats = torch.zeros(_NUM_FLOATS, max_num_reqs, dtype=torch.float32, device=device)
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
