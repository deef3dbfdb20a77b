"""What Model Runner V2 knows of its batch, as the loop on the device wants it."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.core.plan import RequestPlan
from vllm_triforce.kernels.distributions import SamplingParameters
from vllm_triforce.runner_v2.batch import BatchV2, SamplingV2
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.request_flags import RequestFlags


def read_batch(
    runner,
    facts: RequestFlags,
    shaping: LogitsProcessing,
    input_batch,
    rows: np.ndarray,
    plans: Sequence[RequestPlan],
    num_sampled,
    last_sampled,
    own_tables: Sequence[torch.Tensor],
) -> BatchV2:
    """The batch's ``rows``, for the loop on the device.

    Args:
        plans: of each row.
        own_tables: of each KV cache group, [max_rows, width], int32; the rows' block tables are
            written here.
    """
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
        max_num_tokens=np.array([plan.num_tokens for plan in plans]),
        max_num_rounds=np.array([plan.num_rounds for plan in plans]),
        # The scheduler cuts a proposal where its grammar forbids a token.
        is_one_hot=facts.has_grammar[states],
        sampling=_sampling(runner, states, shaping.is_asked(states)),
        tables=[
            torch.index_select(table.gpu, 0, on_device, out=own[: len(rows)])
            for table, own in zip(tables.block_tables, own_tables)
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


def _sampling(runner, states: np.ndarray, is_shaped: bool) -> SamplingV2:
    sampling = runner.sampler.sampling_states
    drawn = states[sampling.temperature.np[states] != 0]
    has_masks = (
        (sampling.top_k.np[drawn] != sampling.vocab_size)
        | (sampling.top_p.np[drawn] != 1.0)
        | (sampling.min_p.np[drawn] != 0.0)
    )
    return SamplingV2(
        all_greedy=not len(drawn),
        has_masks=bool(has_masks.any()),
        is_shaped=is_shaped,
    )
