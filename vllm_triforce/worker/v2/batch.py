"""What Model Runner V2 knows of its batch, as the loop on the device wants it."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.core.step_plan import Proposing
from vllm_triforce.device.batch import DeviceBatch, DeviceSampling
from vllm_triforce.worker.v2.logit_shaping import logit_shaping
from vllm_triforce.worker.v2.request_facts import RequestFacts


def read_batch(
    runner,
    facts: RequestFacts,
    input_batch,
    rows: np.ndarray,
    plans: Sequence[Proposing],
    num_sampled,
    last_sampled,
) -> DeviceBatch:
    """The batch's ``rows``, for the loop on the device.

    Args:
        plans: of each row.
    """
    states = input_batch.idx_mapping_np[rows]
    tables = runner.block_tables
    on_device = _to_device(runner, states.astype(np.int64))
    reserved = tables.num_blocks.np[:, states] * np.array(tables.block_sizes)[:, None]
    limits = np.minimum(runner.max_model_len, runner.req_states.max_seq_len[states])
    return DeviceBatch(
        request_ids=[input_batch.req_ids[row] for row in rows],
        batch_rows=rows,
        states=states,
        max_computed_tokens=input_batch.seq_lens_cpu_upper_bound.numpy()[rows],
        reserved=reserved.min(0),
        limits=limits,
        max_num_tokens=np.array([plan.num_tokens for plan in plans]),
        max_num_rounds=np.array([plan.num_rounds for plan in plans]),
        sampling=_sampling(runner, facts, states, on_device),
        tables=[table.gpu[on_device] for table in tables.block_tables],
        query_rows=_to_device(runner, rows.astype(np.int32)),
        num_computed=runner.req_states.num_computed_tokens.gpu,
        num_sampled=num_sampled,
        last_sampled=last_sampled,
        all_token_ids=runner.req_states.all_token_ids.gpu,
    )


def _sampling(
    runner, facts: RequestFacts, states: np.ndarray, on_device: torch.Tensor
) -> DeviceSampling:
    sampling = runner.sampler.sampling_states
    # The scheduler cuts a proposal where its grammar forbids a token.
    is_cut = facts.has_grammar[states]

    def rows_of(values, unused) -> torch.Tensor | None:
        return None if (values.np[states] == unused).all() else values.gpu[on_device]

    return DeviceSampling(
        temperature=sampling.temperature.gpu[on_device],
        seeds=sampling.seeds.gpu[on_device],
        top_k=rows_of(sampling.top_k, sampling.vocab_size),
        top_p=rows_of(sampling.top_p, 1.0),
        min_p=rows_of(sampling.min_p, 0.0),
        all_greedy=bool((sampling.temperature.np[states] == 0).all()),
        is_certain=_to_device(runner, is_cut.astype(np.int32)) if is_cut.any() else None,
        shaping=logit_shaping(runner.sampler, states, on_device),
    )


def _to_device(runner, values: np.ndarray) -> torch.Tensor:
    return async_tensor_h2d(values, device=runner.device)
