"""EAGLE-3 head (arXiv 2503.01840) or MTP layer over a window of recent tokens."""

import torch

from vllm_triforce.runner_v2.batch import Slot
from vllm_triforce.runner_v2.passes import ModelPass
from vllm_triforce.runner_v2.sources.draft_model import DraftModelV2


class HeadV2(DraftModelV2):
    """Drafts with a head that reads the target's hidden states beside the tokens.

    The first pass of a proposal feeds all tokens that the last full pass can have added, with its
    states; the first pass of a later round those that level 2 can have added, with level 2's.
    """

    name = "head"
    reads_states = True

    def _first_recent(self, slot: Slot) -> int:
        return slot.first_known + 1

    def _prepare_first(self, first_pass: ModelPass, num_padded_rows: int) -> None:
        assert self._hidden_states is not None
        self._hidden_states.gather(first_pass.inputs, num_padded_rows)
        # As when a window is rebuilt.
        first_pass.inputs.token_ids.clamp_(max=self._rows.vocab_size - 1)

    def _prepare_step(self, step_pass: ModelPass, last_pass: ModelPass) -> None:
        """Feed the head's own output in the place of the target's states."""
        num_rows, length = self._rows.num_rows, last_pass.inputs.query_len
        output = last_pass.states[0][: num_rows * length]
        assert step_pass.inputs.hidden is not None
        step_pass.inputs.hidden[:num_rows].copy_(output[length - 1 :: length])

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Make rows uniform that allow no token of the head's vocabulary.

        Such rows have no distribution. Drafts of any other are verified correctly.
        """
        has_none = logits.amax(-1, keepdim=True) == float("-inf")
        return logits.masked_fill(has_none, 0.0)
