"""A source of level 1's tokens on the device; CONTRIBUTING.md tells how to add one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_triforce.kernels.distributions import Distributions
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext
from vllm_triforce.runner_v2.slots import Slot


@dataclass
class SourcePartsV2:
    """Parts that sources are built from.

    Args:
        draft: the draft model as vLLM loaded it; None where none was configured.
        draft_layers: attention layers of the draft by name.
        draft_attention: from (layers, builder) to the platform's attention for the draft.
        all_token_ids: [max_num_reqs, max_model_len], int32, by state, as in each batch.
    """

    context: ProposalContext
    draft: Any
    draft_layers: dict[str, Any]
    draft_attention: Any
    all_token_ids: torch.Tensor


class DraftSourceV2(ABC):
    """Drafts for level 2, for all rows at once and without a word to the host."""

    name: ClassVar[str]
    """Its file's, and that of the same source in ``host/sources``."""
    keeps_window: ClassVar[bool] = False
    """Whether it keeps ``Slot``'s window of what it has read, which every full pass makes longer:
    those behind which it did not draft are told to the slots."""

    @classmethod
    def build(cls, parts: SourcePartsV2) -> "DraftSourceV2":
        """One engine's."""
        return cls()

    @abstractmethod
    def draft(self, batch: BatchV2, rows: Rows, is_first: bool) -> None:
        """Writes ``rows.drafted`` and ``rows.num_drafted`` of the first ``rows.num_rows`` rows.

        A row's newest token has the index ``rows.computed + rows.length``. Those up to
        ``rows.computed`` are in ``batch.all_token_ids``, by the row's state
        (``rows.column(RowColumn.STATE)``); those behind are ``rows.proposal``, of which
        ``rows.length`` count. ``token_at`` in ``kernels/pass_inputs.py`` reads either.

        Args:
            rows: ``drafted`` is [max_rows, gamma], int32, token ids of the vocabulary;
                ``num_drafted`` [max_rows], int32, ``rows.gamma`` at most: neither is looked
                through again.
            is_first: whether it is the first round of the proposal.
        """

    def begin(self, batch: BatchV2, slots: list[Slot]) -> None:  # noqa: B027
        """Called once a proposal, before its rounds."""

    def end(self, batch: BatchV2, rows: Rows) -> None:  # noqa: B027
        """Called once a proposal, behind its rounds: removes NaN of the rows that have a fault."""

    @property
    def distributions(self) -> Distributions | None:
        """Of what was drafted, ``gamma`` places; None where each token was certain."""
        return None

    def capture(self, mode) -> None:  # noqa: B027
        """Captures CUDA graphs."""
