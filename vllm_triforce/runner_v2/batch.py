"""Requests of Model Runner V2: their parameters, slots, and those to speculate on in a step."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.keys import MAX_NUM_SPECULATIVE_TOKENS
from vllm_triforce.controller.routes import Choice
from vllm_triforce.core.limits import proposal_limit
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.rows import Rows, SamplingParameters
from vllm_triforce.metrics.counters import DeviceCounters
from vllm_triforce.runner_v2.logits_processing import LogitsProcessing
from vllm_triforce.runner_v2.sampling import SamplingV2


class RequestFlags(LogitsProcessor):
    """Records flags of each request; a logits processor that changes no logits."""

    def __init__(self, max_num_reqs: int) -> None:
        self.has_grammar = np.zeros(max_num_reqs, dtype=bool)
        self.max_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        """Longest proposal; 0 for a request that decodes plainly."""

    def add_request(self, req_idx: int, sampling_params) -> bool:
        self.has_grammar[req_idx] = sampling_params.structured_outputs is not None
        self.max_tokens[req_idx] = proposal_limit(sampling_params, MAX_NUM_SPECULATIVE_TOKENS)
        return False

    def apply(self, logits, ctx):
        return logits


class Placeholders:
    """Requests with an image, audio or video, and the token ids that stand for these.

    ``in`` tells if a request has one.
    """

    def __init__(self, runner) -> None:
        cache = runner.encoder_cache
        self._features = {} if cache is None else cache.mm_features
        self._device = runner.device
        self._ids: set[int] = set()
        self._is_placeholder: torch.Tensor | None = None
        """[largest id + 2], bool, of all requests so far; None before the first."""

    def __contains__(self, request_id: str) -> bool:
        return bool(self._features.get(request_id))

    def add(self, new_requests: Iterable) -> None:
        num_ids = len(self._ids)
        for request in new_requests:
            for place in (feature.mm_position for feature in request.mm_features):
                token_ids = np.array(request.prefill_token_ids[place.offset :][: place.length])
                is_embed = slice(None) if place.is_embed is None else place.is_embed.numpy()
                self._ids.update(token_ids[is_embed].tolist())
        if len(self._ids) > num_ids:
            table = torch.zeros(max(self._ids) + 2, dtype=torch.bool)
            table[list(self._ids)] = True
            self._is_placeholder = table.to(self._device, non_blocking=True)

    def drop_from(self, token_ids: torch.Tensor) -> None:
        """Replace ids that stand for an image by -1, without waiting for the device."""
        if (table := self._is_placeholder) is not None:
            token_ids.masked_fill_(table[token_ids.clamp(0, len(table) - 1).long()], -1)


@dataclass
class Slot:
    """One request's slot in buffers that last between proposals."""

    index: int
    is_new: bool = True
    summarized_tokens: int = 0
    """Upper bound of the request's tokens at level 2's last proposal."""
    window_start: int = 0
    """Index of the first recent token in level 1's window."""
    first_known: int = 0
    """First position whose hidden state a head may read."""
    has_proposed: bool = False
    """False while it only keeps hidden states for the head."""
    num_read: int = -1
    """Tokens of the prompt that were read with this slot; -1 where none were."""
    window_tokens: int = -1
    """Upper bound of the request's tokens at the last proposal; -1 if the window is invalid."""


class Slots(dict[str, Slot]):
    """Slots by request, released when a request leaves the engine or loses its blocks."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owners(self, indices: list[int]) -> list[str]:
        return [request_id for request_id, slot in self.items() if slot.index in indices]

    def take(self, request_id: str) -> Slot:
        """Return the request's slot, assigning a free one on first use; there must be one."""
        if request_id not in self:
            self[request_id] = Slot(self._free.pop())
        return self[request_id]

    def release_without_proposal(self, count: int, kept: Container[str]) -> None:
        """Release at most ``count`` slots that only keep hidden states, except ``kept``."""
        idle = [r for r, slot in self.items() if not slot.has_proposed and r not in kept]
        for request_id in idle[: max(0, count)]:
            self.release(request_id)

    def invalidate_windows(self, request_ids: set[str]) -> None:
        """Invalidate the windows of requests whose full pass no proposal follows."""
        for request_id in request_ids & self.keys():
            slot = self[request_id]
            slot.window_tokens = -1

    def release(self, request_id: str) -> None:
        if (slot := self.pop(request_id, None)) is not None:
            self._free.append(slot.index)


@dataclass(frozen=True)
class ProposalContext:
    """Objects that all proposals of an engine share."""

    vllm_config: Any
    config: ResolvedConfig
    rows: Rows
    logits_dtype: torch.dtype
    """Of all logits that tokens are sampled from, so that vLLM's rejection sampler reads the
    numbers that the tokens were sampled by."""
    sampler: ExponentialSampler
    logits_processing: LogitsProcessing
    counters: DeviceCounters
    device: torch.device
    slots: Slots
    placeholders: Placeholders

    def take_slots(self, request_ids: Sequence[str]) -> list[Slot]:
        """Assign a slot to each request, and clear the NaN flags of new slots."""
        new_ids = [request_id for request_id in request_ids if request_id not in self.slots]
        taken = [self.slots.take(request_id) for request_id in request_ids]
        if new_ids:
            indices = np.array([self.slots[request_id].index for request_id in new_ids])
            on_device = async_tensor_h2d(indices, device=self.device)
            self.rows.slot_disabled.index_fill_(0, on_device, 0)
        return taken


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
    """Reads batches from vLLM's runner."""

    runner: Any
    flags: RequestFlags
    logits_processing: LogitsProcessing
    tables: Sequence[torch.Tensor]
    """Buffers for block tables, [max_rows, width], int32, one for each KV cache group."""

    def __post_init__(self) -> None:
        # None without M-RoPE.
        self._rope = getattr(self.runner.model_state, "rope_state", None)

    def read(
        self,
        input_batch,
        plans: dict[int, Choice],
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> BatchV2:
        """Read the rows that propose by one route; ``plans`` are by row of ``input_batch``."""
        runner, rows = self.runner, np.array(list(plans))
        states = input_batch.idx_mapping_np[rows]
        tables = runner.block_tables
        state_indices = async_tensor_h2d(states.astype(np.int64), device=runner.device)
        reserved_tokens = tables.num_blocks.np[:, states] * np.array(tables.block_sizes)[:, None]
        sampling = runner.sampler.sampling_states
        return BatchV2(
            request_ids=[input_batch.req_ids[row] for row in rows],
            batch_rows=rows,
            states=states,
            max_computed_tokens=input_batch.seq_lens_cpu_upper_bound.numpy()[rows],
            reserved_tokens=reserved_tokens.min(0),
            max_lens=np.minimum(runner.max_model_len, runner.req_states.max_seq_len[states]),
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
            position_deltas=None if self._rope is None else self._rope.prefill_delta.np[states],
        )

    def _read_sampling(self, states: np.ndarray) -> SamplingV2:
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
