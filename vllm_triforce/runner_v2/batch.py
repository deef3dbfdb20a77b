"""Requests to speculate on after a full pass, read from Model Runner V2's batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.plan import RequestPlan
from vllm_triforce.kernels.distributions import SamplingParameters
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.metrics.counters import DeviceCounters
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.request_flags import RequestFlags
from vllm_triforce.runner_v2.sampling import SamplingV2


@dataclass(frozen=True)
class ProposalContext:
    """Objects that all proposals of an engine share.

    Args:
        logits_dtype: of all logits that tokens are drawn from, so that vLLM's rejection sampler
            reads the numbers that the tokens were drawn by.
    """

    vllm_config: Any
    config: ResolvedConfig
    rows: Rows
    logits_dtype: torch.dtype
    sampler: ExponentialSampler
    logits_processing: LogitsProcessing
    counters: DeviceCounters
    device: torch.device


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


class BatchReader:
    """Reads proposals' batches from vLLM's runner.

    Args:
        tables: of each KV cache group, [max_rows, width], int32; each batch's block tables are
            written there.
    """

    def __init__(
        self,
        runner,
        flags: RequestFlags,
        logits_processing: LogitsProcessing,
        tables: Sequence[torch.Tensor],
    ) -> None:
        self._runner = runner
        self._flags = flags
        self._logits_processing = logits_processing
        self._tables = tables

    def read(
        self,
        input_batch,
        plans: dict[int, RequestPlan],
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> BatchV2:
        """Read the rows that propose by one route.

        Args:
            plans: by row of ``input_batch``.
        """
        runner, rows = self._runner, np.array(list(plans))
        states = input_batch.idx_mapping_np[rows]
        tables = runner.block_tables
        on_device = async_tensor_h2d(states.astype(np.int64), device=runner.device)
        reserved = tables.num_blocks.np[:, states] * np.array(tables.block_sizes)[:, None]
        sampling = runner.sampler.sampling_states
        limits = np.minimum(runner.max_model_len, runner.req_states.max_seq_len[states])
        return BatchV2(
            request_ids=[input_batch.req_ids[row] for row in rows],
            batch_rows=rows,
            states=states,
            max_computed_tokens=input_batch.seq_lens_cpu_upper_bound.numpy()[rows],
            reserved=reserved.min(0),
            limits=limits,
            max_num_tokens=np.array([plan.num_tokens for plan in plans.values()]),
            max_num_rounds=np.array([plan.num_rounds for plan in plans.values()]),
            # The scheduler cuts a proposal where its grammar forbids a token.
            is_one_hot=self._flags.has_grammar[states],
            sampling=self._read_sampling(states),
            tables=[
                torch.index_select(table.gpu, 0, on_device, out=own[: len(rows)])
                for table, own in zip(tables.block_tables, self._tables)
            ],
            num_computed=runner.req_states.num_computed_tokens.gpu,
            num_sampled=num_sampled,
            last_sampled=last_sampled,
            parameters=SamplingParameters(
                sampling.temperature.gpu,
                sampling.seeds.gpu,
                sampling.top_k.gpu,
                sampling.top_p.gpu,
                sampling.min_p.gpu,
            ),
            all_token_ids=runner.req_states.all_token_ids.gpu,
        )

    def _read_sampling(self, states: np.ndarray) -> SamplingV2:
        sampling = self._runner.sampler.sampling_states
        drawn = states[sampling.temperature.np[states] != 0]
        has_masks = (
            (sampling.top_k.np[drawn] != sampling.vocab_size)
            | (sampling.top_p.np[drawn] != 1.0)
            | (sampling.min_p.np[drawn] != 0.0)
        )
        return SamplingV2(
            all_greedy=not len(drawn),
            has_masks=bool(has_masks.any()),
            has_processors=self._logits_processing.is_needed(states),
        )
