"""Requests to speculate on after a full pass, read from Model Runner V2's batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.messages import RequestPlan
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.rows import Rows, SamplingParameters
from vllm_triforce.metrics.counters import DeviceCounters
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.request_flags import Placeholders, RequestFlags
from vllm_triforce.runner_v2.sampling import SamplingV2


@dataclass(frozen=True)
class ProposalContext:
    """Objects that all proposals of an engine share.

    Args:
        logits_dtype: of all logits that tokens are sampled from, so that vLLM's rejection sampler
            reads the numbers that the tokens were sampled by.
    """

    vllm_config: Any
    config: ResolvedConfig
    rows: Rows
    logits_dtype: torch.dtype
    sampler: ExponentialSampler
    logits_processing: LogitsProcessing
    counters: DeviceCounters
    device: torch.device
    placeholders: Placeholders


@dataclass
class BatchV2:
    """Requests to speculate on after a full pass, one per row."""

    request_ids: list[str]
    batch_rows: np.ndarray  # [num_rows], rows in the runner's batch
    states: np.ndarray  # [num_rows], indices of the request states in the runner's tensors
    max_computed_tokens: np.ndarray
    """[num_rows], upper bounds of the tokens with KV once the full pass is verified."""
    reserved_tokens: np.ndarray  # [num_rows], capacity of the allocated blocks
    max_lens: np.ndarray  # [num_rows], length at which the request ends
    max_num_tokens: np.ndarray  # [num_rows], tokens of the proposal
    max_num_rounds: np.ndarray  # [num_rows], rounds of the proposal
    is_one_hot: np.ndarray  # [num_rows], bool, True to export one-hot distributions
    sampling: SamplingV2
    tables: list[torch.Tensor]
    """Block tables for each KV cache group, [num_rows, width], int32."""
    num_computed: torch.Tensor  # [max_num_reqs], int32, by state
    num_sampled: torch.Tensor  # [batch size], int
    last_sampled: torch.Tensor  # [max_num_reqs, 1], int64, by state
    parameters: SamplingParameters
    all_token_ids: torch.Tensor  # [max_num_reqs, max_model_len], int32, by state
    position_deltas: np.ndarray | None = None
    """[num_rows], M-RoPE positions of generated tokens minus their positions in the request."""

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass
class BatchReader:
    """Reads batches from vLLM's runner.

    Args:
        tables: buffers for each batch's block tables, [max_rows, width], int32, one for each KV
            cache group.
        rope: vLLM's ``RopeState``; None without M-RoPE.
    """

    runner: Any
    flags: RequestFlags
    logits_processing: LogitsProcessing
    tables: Sequence[torch.Tensor]
    rope: Any = None

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
        runner, rows = self.runner, np.array(list(plans))
        states = input_batch.idx_mapping_np[rows]
        tables = runner.block_tables
        state_indices = async_tensor_h2d(states.astype(np.int64), device=runner.device)
        reserved_tokens = tables.num_blocks.np[:, states] * np.array(tables.block_sizes)[:, None]
        sampling = runner.sampler.sampling_states
        max_lens = np.minimum(runner.max_model_len, runner.req_states.max_seq_len[states])
        return BatchV2(
            request_ids=[input_batch.req_ids[row] for row in rows],
            batch_rows=rows,
            states=states,
            max_computed_tokens=input_batch.seq_lens_cpu_upper_bound.numpy()[rows],
            reserved_tokens=reserved_tokens.min(0),
            max_lens=max_lens,
            max_num_tokens=np.array([plan.num_tokens for plan in plans.values()]),
            max_num_rounds=np.array([plan.num_rounds for plan in plans.values()]),
            # The scheduler truncates a proposal where the grammar forbids a token: only one-hot
            # drafts are verified correctly then.
            is_one_hot=self.flags.has_grammar[states],
            sampling=self._read_sampling(states),
            tables=[
                torch.index_select(table.gpu, 0, state_indices, out=buffer[: len(rows)])
                for table, buffer in zip(tables.block_tables, self.tables)
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
            position_deltas=None if self.rope is None else self.rope.prefill_delta.np[states],
        )

    def _read_sampling(self, states: np.ndarray) -> SamplingV2:
        """Say which kinds of sampling the requests need."""
        sampling = self.runner.sampler.sampling_states
        sampled = states[sampling.temperature.np[states] != 0]
        has_masks = (
            (sampling.top_k.np[sampled] != sampling.vocab_size)
            | (sampling.top_p.np[sampled] != 1.0)
            | (sampling.min_p.np[sampled] != 0.0)
        )
        return SamplingV2(
            all_greedy=not len(sampled),
            has_masks=bool(has_masks.any()),
            has_processors=self.logits_processing.is_needed(states),
        )
