"""What Model Runner V2 hands to the device-resident loop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

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


@dataclass(frozen=True)
class DeviceSampling:
    """What the host knows of the rows' sampling, and what is on the device beside temperatures and
    seeds, which ``Rows`` has."""

    all_greedy: bool
    top_k: torch.Tensor | None = None  # [num_rows], int32; None where no row has one, as below
    top_p: torch.Tensor | None = None  # [num_rows], float32
    min_p: torch.Tensor | None = None  # [num_rows], float32
    shaping: LogitShaping | None = None
    """None where no row asks for any."""

    @property
    def is_plain(self) -> bool:
        """Whether temperatures and seeds are all that there is."""
        return all(its is None for its in (self.top_k, self.top_p, self.min_p, self.shaping))


class Masks:
    """Sampling parameters of the rows, each row's ``times`` over, for ``masked_logits``."""

    def __init__(self, sampling: DeviceSampling, rows: Rows, times: int = 1) -> None:
        def repeat(values):
            if values is None or times == 1:
                return values
            return values.repeat_interleave(times)

        self.divisor = repeat(rows.divisor[: rows.num_rows])
        self.top_k, self.top_p = repeat(sampling.top_k), repeat(sampling.top_p)
        self.min_p = repeat(sampling.min_p)


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
    is_certain: np.ndarray  # [num_rows], bool: handed up as if each of its tokens were certain
    sampling: DeviceSampling
    tables: list[torch.Tensor]
    """For each KV cache group, [num_rows, width], int32, block tables."""
    num_computed: torch.Tensor  # [max_num_reqs], int32, by state
    num_sampled: torch.Tensor  # [batch size], int
    last_sampled: torch.Tensor  # [max_num_reqs, 1], int64, by state
    temperatures: torch.Tensor  # [max_num_reqs], float32, by state; 0 is greedy
    seeds: torch.Tensor  # [max_num_reqs], int64, by state
    all_token_ids: torch.Tensor  # [max_num_reqs, max_model_len], int32, by state

    def __len__(self) -> int:
        return len(self.request_ids)
