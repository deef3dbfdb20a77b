"""What Model Runner V2 hands to the device-resident loop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from vllm_triforce.kernels.distributions import SamplingParameters
from vllm_triforce.kernels.rows import Rows


class RowLogitsProcessor(ABC):
    """What the requests of a proposal's rows ask of their logits, before anything is drawn."""

    @abstractmethod
    def begin(self) -> None:
        """Reads what the requests of the rows ask; called where any asks for something, once a
        proposal."""

    @abstractmethod
    def shape(
        self,
        logits: torch.Tensor,  # [num_rows * query_len, vocab_size]
        first_place: int,
    ) -> torch.Tensor:  # float32; may be what was given, changed
        """Launches alone, so that it may be in a CUDA graph.

        Args:
            logits: of ``query_len`` places of each row; what place n says follows the proposal as
                it stands and n of the round's drafts.
            first_place: of those.
        """


@dataclass(frozen=True)
class SamplingV2:
    """What the host knows of the rows' sampling; each row's own parameters are in ``Rows``."""

    all_greedy: bool
    has_masks: bool = False
    """Whether a row has top-k, top-p or min-p; False where all are greedy."""
    is_shaped: bool = False
    """Whether a row asks anything else of its logits (``RowLogitsProcessor``)."""

    @property
    def kind(self) -> str:
        """By which rounds are captured: greedy ones, and those that do all that can be asked."""
        return "greedy" if self.all_greedy and not self.is_shaped else "any"


# What is captured of each kind. What a row does not ask for leaves its logits as they are, and
# takes a few microseconds in a graph; each kind more takes its share of memory and of the start.
CAPTURED_SAMPLING = (
    SamplingV2(True),
    SamplingV2(False, has_masks=True, is_shaped=True),
)


class Masks:
    """Sampling parameters of the rows, each row's ``times`` over, for ``masked_logits``."""

    def __init__(self, sampling: SamplingV2, rows: Rows, times: int = 1) -> None:
        def repeat(values):
            values = values[: rows.num_rows]
            return values if times == 1 else values.repeat_interleave(times)

        self.divisor = repeat(rows.divisor)
        self.top_k = self.top_p = self.min_p = None
        if sampling.has_masks:
            self.top_k, self.top_p, self.min_p = map(repeat, (rows.top_k, rows.top_p, rows.min_p))


@dataclass
class BatchV2:
    """Requests to speculate on after a full pass, a row each."""

    request_ids: list[str]
    batch_rows: np.ndarray  # [num_rows], each row's place in the runner's batch
    states: np.ndarray  # [num_rows], its place in the runner's tensors
    max_computed_tokens: np.ndarray
    """[num_rows], upper bound of the tokens whose KV the full pass has written and accepted."""
    reserved: np.ndarray  # [num_rows], tokens that its allocated blocks hold
    limits: np.ndarray  # [num_rows], length at which it ends
    max_num_tokens: np.ndarray  # [num_rows], of its proposal
    max_num_rounds: np.ndarray  # [num_rows], in which level 1 drafts for it
    is_one_hot: np.ndarray  # [num_rows], bool: handed up as if each of its tokens were certain
    sampling: SamplingV2
    tables: list[torch.Tensor]
    """For each KV cache group, [num_rows, width], int32, block tables."""
    num_computed: torch.Tensor  # [max_num_reqs], int32, by state
    num_sampled: torch.Tensor  # [batch size], int
    last_sampled: torch.Tensor  # [max_num_reqs, 1], int64, by state
    parameters: SamplingParameters
    all_token_ids: torch.Tensor  # [max_num_reqs, max_model_len], int32, by state

    def __len__(self) -> int:
        return len(self.request_ids)
