"""Interface of level 1's sources of drafts on the device (CONTRIBUTING.md: how to add one)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.kernels.draw import Distributions
from vllm_triforce.kernels.hidden_states import gather_states
from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext, Slot


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
        shape = rows.max_rows + 1, capacity, hidden_size
        self.ring = torch.zeros(shape, dtype=dtype, device=device)
        """[num_slots + 1, capacity, hidden_size]; the last slot takes states that are dropped."""

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
        self.ring[slots, positions % self._capacity] = states

    def gather(self, inputs: PassInputs, padded_rows: int) -> None:
        """Write the state before each of the newest tokens of each row into ``inputs.hidden``."""
        assert inputs.hidden is not None
        gather_states(self._rows, self.ring, inputs.query_len, padded_rows, inputs.hidden)

    def before(self, slots: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the state before each token, [num_tokens, hidden_size]."""
        return self.ring[slots, (indices - 1) % self._capacity]


@dataclass
class SourcePartsV2:
    """Parts that sources are built from.

    Args:
        draft: the draft model as vLLM loaded it; None where none was configured.
        draft_config: vLLM's config in which a pass of the draft finds its layers.
        draft_attention: from (layers, builder) to the platform's attention for the draft.
        all_token_ids: [max_num_reqs, max_model_len], int32, by state, as in each batch.
        hidden_states: states for a head; None without one.
    """

    context: ProposalContext
    draft: Any
    draft_layers: dict[str, Any]
    draft_config: Any
    draft_attention: Any
    all_token_ids: torch.Tensor
    hidden_states: HiddenStatesV2 | None = None


class DraftSourceV2(ABC):
    """Drafts tokens for all rows at once, without synchronizing with the host."""

    name: ClassVar[str]
    """Name of its file, and of the same source in ``runner_v1/sources``."""
    keeps_window: ClassVar[bool] = False
    """True if the source caches the tokens it has read in ``Slot``'s window. A full pass without a
    proposal by this source then invalidates the window (``Slots.invalidate_windows``)."""

    @classmethod
    def build(cls, parts: SourcePartsV2) -> "DraftSourceV2":
        """Build the source of one engine."""
        return cls()

    @abstractmethod
    def draft(self, batch: BatchV2, rows: Rows, is_first: bool) -> None:
        """Write ``rows.drafted`` and ``rows.num_drafted`` of the first ``rows.num_rows`` rows.

        A row's newest token has the index ``rows.computed + rows.length``. Tokens up to
        ``rows.computed`` are in ``batch.all_token_ids``, by the row's state
        (``rows.column(RowColumn.STATE)``). Later tokens are the first ``rows.length`` of
        ``rows.proposal``. ``token_at`` in ``kernels/pass_inputs.py`` reads either.

        Args:
            rows: ``drafted`` is [max_rows, gamma], int32, token ids of the vocabulary.
                ``num_drafted`` is [max_rows], int32, at most ``rows.gamma``. Neither is validated.
                All fields are strided views of ``rows.table``.
            is_first: True in the first round of the proposal.
        """

    def begin(self, batch: BatchV2, slots: list[Slot]) -> None:  # noqa: B027
        """Prepare a proposal, before its first round."""

    def end(self, batch: BatchV2, rows: Rows) -> None:  # noqa: B027
        """End a proposal, after its last round; scrub NaNs from caches of rows that had one."""

    @property
    def distributions(self) -> Distributions | None:
        """Distributions of the drafts, ``gamma`` places; None if they are one-hot."""
        return None

    def capture(self, mode) -> None:  # noqa: B027
        """Capture CUDA graphs."""
