"""Interface of level 1's sources of drafts on the device (CONTRIBUTING.md: how to add one)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_triforce.kernels.draw import Distributions
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext, Slot
from vllm_triforce.runner_v2.hidden_states import HiddenStatesV2


@dataclass
class SourcePartsV2:
    """Parts that sources are built from.

    Args:
        draft: the draft model as vLLM loaded it; None where none was configured.
        draft_layers: attention layers of the draft by name.
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
