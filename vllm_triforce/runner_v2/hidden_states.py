"""The target's hidden states that a head reads, for each slot."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.kernels.hidden_states import gather_states, store_states
from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows


class HiddenStatesV2:
    """Keeps the states at the newest ``capacity`` positions of each slot's request.

    They come from full passes, plain steps among them, and from passes of level 2. A later pass
    over a position replaces its state, so states of rejected drafts need no bookkeeping.

    Args:
        fuse: projects a token's states to the head's input (``core/models.py``).
        capacity: positions that a window may need, and those of a proposal.
    """

    def __init__(
        self,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        rows: Rows,
        capacity: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._fuse = fuse
        self._rows = rows
        self._capacity = capacity
        self._device = device
        self._dtype = dtype
        self.ring = torch.zeros(rows.max_rows, capacity, hidden_size, dtype=dtype, device=device)

    def add_full_pass(
        self,
        aux: Sequence[torch.Tensor],  # [num_tokens or more, hidden_size] of each layer
        positions: torch.Tensor,  # [num_tokens or more], int64
        lengths: np.ndarray,  # [num_reqs], tokens of each request in this pass
        slots: np.ndarray,  # [num_reqs], -1 for requests without a slot
    ) -> None:
        """Keep the states of a full pass; of long prompts those at the newest positions."""
        if (slots < 0).all():
            return
        num_tokens = int(lengths.sum())
        by_token = np.repeat(slots, lengths)
        if lengths.max() > self._capacity:
            ends = np.cumsum(lengths).repeat(lengths)
            is_newest = np.arange(num_tokens) >= ends - self._capacity
            kept = np.flatnonzero(is_newest & (by_token >= 0))
            by_token = by_token[kept]
            index = async_tensor_h2d(kept, self._device)
            aux, positions = [states[index] for states in aux], positions[index]
        else:
            aux, positions = [states[:num_tokens] for states in aux], positions[:num_tokens]
        self._store(aux, async_tensor_h2d(by_token, self._device), positions)

    def add_pass(self, aux: Sequence[torch.Tensor], inputs: PassInputs) -> None:
        """Keep the states of level 2's pass over ``inputs``, at fixed addresses for graphs."""
        length = inputs.query_len
        num_tokens = self._rows.num_rows * length
        slots = self._rows.column(RowColumn.SLOT).repeat_interleave(length, output_size=num_tokens)
        is_read = inputs.slot_mapping[:num_tokens] >= 0
        self._store(
            [states[:num_tokens] for states in aux],
            torch.where(is_read, slots, -1),
            inputs.positions[:num_tokens],
        )

    def _store(
        self, aux: Sequence[torch.Tensor], slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        states = self._fuse(torch.cat(list(aux), -1).to(self._dtype))
        store_states(self.ring, states, slots, positions)

    def gather(self, inputs: PassInputs, padded_rows: int) -> None:
        """Write the state before each of the newest tokens of each row into ``inputs.hidden``."""
        assert inputs.hidden is not None
        gather_states(self._rows, self.ring, inputs.query_len, padded_rows, inputs.hidden)

    def before(self, slots: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the state before each token, [num_tokens, hidden_size].

        Args:
            slots, indices: [num_tokens], int64, of each token.
        """
        return self.ring[slots, (indices - 1) % self._capacity]
