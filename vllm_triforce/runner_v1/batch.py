"""What Model Runner V1 knows of its batch, as the levels want it: who may propose how much."""

from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.eligibility import decodes_plainly, max_proposal_len, sampling_seed
from vllm_triforce.core.sampling import GREEDY_EPSILON
from vllm_triforce.runner_v1.draft_batch import DraftBatch, SamplingRows
from vllm_triforce.runner_v1.logits_processing import LogitsProcessing


class RunnerBatch:
    """Reads a runner's batch, row by row.

    Args:
        recorder: of the full pass's queries.
        disabled: requests that are not speculated on again.
    """

    def __init__(
        self, runner, config: ResolvedConfig, recorder, disabled: Collection[str], device
    ) -> None:
        self._runner = runner
        self._config = config
        self._recorder = recorder
        self._disabled = disabled
        self._device = device

    def is_never_speculated_on(self, row: int) -> bool:
        request_id = self._runner.input_batch.req_ids[row]
        return decodes_plainly(self._params(row)) or request_id in self._disabled

    def max_proposal_len(self, row: int, num_computed: int, most: int) -> int:
        """Tokens worth proposing for a request: by its context, its slots and what it may emit."""
        if num_computed < self._config.min_context or self.is_never_speculated_on(row):
            return 0
        input_batch = self._runner.input_batch
        request = self._runner.requests[input_batch.req_ids[row]]
        slots = min(
            int(table.num_blocks_per_row[row]) * table.block_size
            for table in input_batch.block_table.block_tables
        )
        params, limit = request.sampling_params, self._runner.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        most = max_proposal_len(num_computed, most, slots, limit)
        emitted = num_computed + 1 - request.num_prompt_tokens
        if emitted < params.min_tokens:
            # vLLM masks stop tokens of the bonus token by what was emitted before the step, so
            # a proposal must not reach past min_tokens.
            most = min(most, params.min_tokens - emitted - 1)
        return most

    def limit_rows(self, rows: list[int], known: Collection[str], most: int) -> list[int]:
        """Choose rows that may be speculated on: who was already goes first.

        A sampled token that is proposed keeps a distribution over the vocabulary until it is
        verified.
        """
        if len(rows) <= most:
            return rows
        names = self._runner.input_batch.req_ids
        by_age = sorted(rows, key=lambda row: names[row] not in known)
        return sorted(by_age[:most])

    def has_seed(self, row: int) -> bool:
        return sampling_seed(self._params(row)) is not None

    def gives_first_token(self, counts: list[int]) -> bool:
        """Whether somebody's first token leaves with this step: no proposal keeps it waiting."""
        request_ids = self._runner.input_batch.req_ids
        # The new token is not among the outputs yet.
        return any(
            count and not self._runner.requests[request_id].output_token_ids
            for request_id, count in zip(request_ids, counts)
        )

    def draft_batch(
        self, rows, computed, room, num_rejected, sampled, counts, sampling: SamplingRows
    ) -> DraftBatch:
        input_batch = self._runner.input_batch
        tables = input_batch.block_table.block_tables
        token_ids = []
        for row in rows:
            known = input_batch.token_ids_cpu[row, : computed[row] + 1 - counts[row]]
            new = np.asarray(sampled[row][: counts[row]], dtype=np.int32)
            token_ids.append(np.concatenate([known, new]))
        return DraftBatch(
            request_ids=[input_batch.req_ids[row] for row in rows],
            token_ids=token_ids,
            num_computed_tokens=[computed[row] for row in rows],
            max_num_tokens=[room[row] for row in rows],
            block_tables=[
                [table.block_table.np[row, : table.num_blocks_per_row[row]] for row in rows]
                for table in tables
            ],
            queries=[partial(self._recorder.last_accepted, row, num_rejected[row]) for row in rows],
            sampling=sampling,
            num_plain=len(counts) - len(rows),
            is_greedy=[self._params(row).temperature < GREEDY_EPSILON for row in rows],
            num_left=[self._num_left(row, computed[row]) for row in rows],
            logits_processors=[
                self._logits_processor(row, tokens) for row, tokens in zip(rows, token_ids)
            ],
        )

    def sampling(self, rows: list[int], metadata) -> SamplingRows:
        requests = self._runner.requests
        params = [requests[self._runner.input_batch.req_ids[row]].sampling_params for row in rows]
        seeds = [sampling_seed(p) for p in params]
        if metadata.temperature is None:
            return SamplingRows(torch.zeros(len(rows), device=self._device), seeds=seeds)
        min_p = [p.min_p for p in params]
        temperature = metadata.temperature[rows]
        if structured := [i for i, p in enumerate(params) if p.structured_outputs is not None]:
            # The scheduler cuts their proposals at the first token that the grammar forbids. Had it
            # been drawn, what is sampled in its place would have to come from a residual; of
            # certain tokens, the likeliest ones, any number may be cut.
            temperature[structured] = 0.0
        return SamplingRows(
            temperature=temperature,
            top_k=None if metadata.top_k is None else metadata.top_k[rows],
            top_p=None if metadata.top_p is None else metadata.top_p[rows],
            min_p=torch.tensor(min_p, device=self._device) if any(min_p) else None,
            seeds=seeds,
        )

    def _logits_processor(self, row: int, token_ids: np.ndarray) -> LogitsProcessing | None:
        input_batch = self._runner.input_batch
        num_prompt_tokens = self._runner.requests[input_batch.req_ids[row]].num_prompt_tokens
        size = input_batch.vocab_size
        return LogitsProcessing.for_request(
            self._params(row), token_ids, num_prompt_tokens, size, self._device
        )

    def _params(self, row: int):
        return self._runner.requests[self._runner.input_batch.req_ids[row]].sampling_params

    def _num_left(self, row: int, num_computed: int) -> int:
        """Tokens that a request may still emit."""
        request = self._runner.requests[self._runner.input_batch.req_ids[row]]
        left = self._runner.max_model_len - num_computed
        most = request.sampling_params.max_tokens
        return left if most is None else most - (num_computed + 1 - request.num_prompt_tokens)


def forget_blocks(runner, kept: Mapping[str, tuple[int, ...]]) -> None:
    """Removes the last blocks of requests, which the scheduler has taken back.

    Args:
        kept: blocks that each has left, by KV cache group.
    """
    batch = runner.input_batch
    for name, counts in kept.items():
        if name not in runner.requests:
            continue
        for ids, count in zip(runner.requests[name].block_ids, counts):
            del ids[count:]
        if (row := batch.req_id_to_index.get(name)) is not None:
            for table, count in zip(batch.block_table.block_tables, counts):
                table.num_blocks_per_row[row] = count
