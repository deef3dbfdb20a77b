"""What Model Runner V2 hands to the device-resident loop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_triforce.kernels.distributions import DrawParameters
from vllm_triforce.kernels.rows import PassInputs, Rows


class LogitShaping(ABC):
    """What the requests of a proposal's rows ask of their logits, before anything is drawn.

    What either method returns is float32, and may be what it was given, changed.
    """

    @abstractmethod
    def shape_drafts(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size], level 1's
        positions: torch.Tensor,  # [num_rows], int64, of the tokens that they follow
    ) -> torch.Tensor: ...

    @abstractmethod
    def shape_target(
        self,
        logits: torch.Tensor,  # [num_rows, query_len, vocab_size], level 2's
        inputs: PassInputs,  # of the pass that gave them
        rows: Rows,
    ) -> torch.Tensor: ...


@dataclass
class DeviceSampling(DrawParameters):
    """Sampling parameters of the rows; on the device, with what the host knows of them."""

    top_k: torch.Tensor | None  # [num_rows], int32; None where no row has one, as the two below
    top_p: torch.Tensor | None  # [num_rows], float32
    min_p: torch.Tensor | None  # [num_rows], float32
    all_greedy: bool
    is_certain: torch.Tensor | None = None
    """[num_rows], int32; not 0: the proposal is handed up as if each token were certain."""
    shaping: LogitShaping | None = None
    """None where no row asks for any."""

    @cached_property
    def divisor(self) -> torch.Tensor:  # [num_rows], float32
        """Temperatures, and 1 where a row is greedy."""
        return torch.where(self.temperature > 0, self.temperature, 1.0)


@dataclass
class DeviceBatch:
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
    sampling: DeviceSampling
    tables: list[torch.Tensor]
    """For each KV cache group, [num_rows, width], int32, block tables."""
    query_rows: torch.Tensor  # [num_rows], int32, each row's place in the recorded queries
    num_computed: torch.Tensor  # [max_num_reqs], int32, by state
    num_sampled: torch.Tensor  # [batch size], int
    last_sampled: torch.Tensor  # [max_num_reqs, 1], int64, by state
    all_token_ids: torch.Tensor  # [max_num_reqs, max_model_len], int32, by state

    def __len__(self) -> int:
        return len(self.request_ids)
