"""What Runner V2 tells the scheduler of a proposal."""

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_triforce.kernels.bookkeeping import PAD_TOKEN


class ProposedTokensHandler(DraftTokensHandler):
    """Tells the scheduler which tokens were proposed for each request, maybe none.

    vLLM's own announces ``num_speculative_tokens`` placeholders for every request. So does an
    asynchronous scheduler by itself, which asks only where a grammar has to see the tokens.

    Args:
        is_asynchronous: the scheduler does not ask, but for structured output.
    """

    def __init__(self, device: torch.device, is_asynchronous: bool) -> None:
        super().__init__(device)
        self._is_asynchronous = is_asynchronous
        self._tokens: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._num_places = 0
        self._held: tuple[torch.Tensor, ...] = ()
        self._copied: tuple[np.ndarray, ...] | None = None

    def proposed(
        self,
        tokens: torch.Tensor,  # [num_reqs, num_speculative_tokens], int64
        lengths: torch.Tensor | None,  # [num_reqs], int32; None: nothing was proposed
    ) -> None:
        self._tokens, self._lengths = tokens, lengths
        self._num_places = tokens.shape[1]

    def set_draft_tokens(self, input_batch, draft_tokens) -> None:
        self.req_ids = input_batch.req_ids
        if self._copied is not None:
            self.copy_event.synchronize()
        self._copied = None
        if self._lengths is None:
            return
        if self._is_asynchronous and not input_batch.has_structured_output_reqs:
            return
        # Held until they are copied: the next step writes over vLLM's own buffer.
        self._held = self._tokens.clone(), self._lengths
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._copied = tuple(async_copy_to_np(tensor) for tensor in self._held)
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds:
        num_reqs = len(self.req_ids)
        if self._copied is None:
            tokens = [[PAD_TOKEN] * self._num_places for _ in range(num_reqs)]
            lengths = [0] * num_reqs
        else:
            self.copy_event.synchronize()
            tokens, lengths = (copied.tolist() for copied in self._copied)
        if self._is_asynchronous:
            # The full pass verifies the padding too, so the grammar has to see it.
            return DraftTokenIds(self.req_ids, tokens)
        return DraftTokenIds(self.req_ids, [row[:length] for row, length in zip(tokens, lengths)])
