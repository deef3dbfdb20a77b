"""Adapter of Model Runner V2, and the rows that it proposes for."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import _extrapolate_full_graph_memory
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.draft_sources import MODEL_SOURCE
from vllm_triforce.controller.lengths import fixed_choice
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL, LEVEL2_ALONE, PLAIN_ROUTE, Choice
from vllm_triforce.core.limits import DisabledRequests
from vllm_triforce.core.messages import BLOCKS_KEPT, PLAN, StepPlan
from vllm_triforce.core.models import states_read, with_own_layers
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.kernels.proposals import PAD_TOKEN
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.runner_v2.batch import BatchReader, RequestFlags
from vllm_triforce.runner_v2.build import SpeculatorPartsV2
from vllm_triforce.runner_v2.calibration import warm_up_proposals
from vllm_triforce.runner_v2.decode_graphs import choose_decode_graphs
from vllm_triforce.runner_v2.graph_sizes import num_graphs
from vllm_triforce.runner_v2.rejection import replace_rejection_sampler
from vllm_triforce.runner_v2.reports import ProposedTokensHandler, Reports
from vllm_triforce.runner_v2.sources.source import HiddenStatesV2
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")


@dataclass
class Routes:
    """Chooses the rows that propose, and the route of each, by the scheduler's plan."""

    config: ResolvedConfig
    built: SpeculatorPartsV2
    flags: RequestFlags

    def route_batch(
        self, input_batch, plan: StepPlan | None, max_tokens: int
    ) -> dict[str, dict[int, Choice]]:
        """Group the rows that propose by route, each with its plan.

        The result must be the same on all tensor parallel ranks: it may not depend on how far a
        rank's device is.

        Args:
            plan: None if the scheduler makes none: then every eligible request gets a fixed plan.
            max_tokens: limit of a proposal.
        """
        routes: dict[str, dict[int, Choice]] = {}
        kept_windows, slots = set(), self.built.slots
        num_free = slots.num_free
        for row, request_id, request_plan in self._eligible_rows(input_batch, plan, max_tokens):
            route = self._route(request_id, request_plan.route)
            if route == PLAIN_ROUTE:
                continue
            if request_id not in slots:
                if not num_free:
                    continue
                num_free -= 1
            limit = min(max_tokens, int(self.flags.max_tokens[input_batch.idx_mapping_np[row]]))
            routes.setdefault(route, {})[row] = replace(
                request_plan, num_tokens=min(request_plan.num_tokens, limit)
            )
            if self.built.speculator.keeps_window(route):
                kept_windows.add(request_id)
        slots.invalidate_windows(set(input_batch.req_ids) - kept_windows)
        return routes

    def _route(self, request_id: str, route: str) -> str:
        """Return the route of a request, which is without the draft model if it has images."""
        level1 = self.built.speculator.level1 if route == HIERARCHICAL else None
        if (
            MODEL_SOURCE not in (route, None if level1 is None else level1.name)
            or request_id not in self.built.context.placeholders
        ):
            return route
        return LEVEL2_ALONE if route == HIERARCHICAL else PLAIN_ROUTE

    def _eligible_rows(
        self, input_batch, plan: StepPlan | None, max_tokens: int
    ) -> Iterator[tuple[int, str, Choice]]:
        """Yield (row, request id, plan) of rows that decode, are long enough and have a plan.

        The host has upper bounds of the lengths; the device checks them again.
        """
        if not max_tokens or (plan is not None and not plan.proposing):
            return
        num_reqs = input_batch.num_reqs
        scheduled = input_batch.num_scheduled_tokens[:num_reqs]
        num_read = input_batch.num_computed_prefill_tokens_np[:num_reqs] + scheduled
        decodes = num_read >= input_batch.prefill_len_np[:num_reqs]
        max_lens = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        states = input_batch.idx_mapping_np[:num_reqs]
        is_eligible = decodes & (self.flags.max_tokens[states] > 0)
        is_eligible &= max_lens >= self.config.min_context
        if plan is None:  # the scheduler plans for no larger batch
            is_eligible = is_eligible[: self.config.max_batch]
        for row in np.flatnonzero(is_eligible).tolist():
            request_id = input_batch.req_ids[row]
            if plan is None:
                yield row, request_id, fixed_choice(self.config, max_tokens)
            elif request_id in plan.proposing:
                yield row, request_id, plan.proposing[request_id]


class RunnerAdapterV2(RunnerAdapter, StandaloneARSpeculator):
    """Proposes with TriForce's levels in the place of vLLM's speculator.

    vLLM's class loads the draft and has the buffers that the runner reads. The runner
    (vllm/v1/worker/gpu/model_runner.py) calls ``propose`` when the outcome of a full pass is in its
    request states. It writes the result to ``req_states.draft_tokens``, and its
    ``draft_tokens_handler`` reports to the scheduler. The next rejection test reads level 2's
    distributions (``rejection.py``), not this class's ``draft_logits``, which is None.

    The full pass may verify more tokens than were proposed: an asynchronous scheduler does not read
    proposals, and schedules the planned number of drafts. Missing drafts are PAD_TOKEN, a token of
    the vocabulary, as the full pass looks up its embedding. The rejection test gets -1 instead
    (``kernels/proposals.py``), which it rejects, and samples from the target.

    ``propose()`` never waits for the device: the scheduler plans routes, tokens and rounds before
    the step. A synchronous scheduler waits once, for the tokens.
    """

    num_extra_query_per_req = 0
    graph_bytes = 0
    """Estimated bytes of proposals' CUDA graphs, once vLLM has measured its own graphs."""
    # Set by ``allocate()``.
    built: SpeculatorPartsV2
    _flags: RequestFlags
    _routes: Routes
    _reader: BatchReader

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(with_own_layers(vllm_config), device)
        self.set_up(runner, config, draft_model)
        self.model = cast(torch.nn.Module, None)  # until a draft is loaded
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list = []
        self._handler = ProposedTokensHandler(device, vllm_config.scheduler_config.async_scheduling)
        swaps.DRAFT_TOKENS_HANDLER.set(runner, self._handler)
        self._graph_mode = CUDAGraphMode.NONE
        self._report = IntervalReport(config.log_interval)
        self._disabled_requests = DisabledRequests()
        self._num_nan_requests = 0
        self.plan: StepPlan | None = None
        self._reports = Reports(device)
        self._measurements: Measurements | None = None
        # By state: True if a proposal and its distributions may be in the buffers.
        self._has_proposal = np.zeros(self.max_num_reqs, dtype=bool)

    # Start-up, in the order of the calls.

    def load_model(self, target_model) -> None:
        self.load_models(target_model, partial(super().load_model, target_model))

    def load_draft_model(self, target_model, target_attn_layer_names: set[str]) -> torch.nn.Module:
        if self.config.has_head:
            return load_eagle_model(target_model, self.vllm_config)
        return super().load_draft_model(target_model, target_attn_layer_names)

    def set_attn(self, *args, **kwargs) -> None:
        """Do nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Choose the graph mode: levels 1 and 2 are captured wherever vLLM captures anything.

        They use their own kernels, so the limits of the attention backend's graphs do not apply.
        """
        choose_decode_graphs(self._runner)
        if cudagraph_mode != CUDAGraphMode.NONE:
            cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        self._graph_mode = cudagraph_mode

    def allocate(self, kv_cache_config, offload=None) -> None:
        """Build the levels, once the target's KV cache exists."""
        self.built = built = SpeculatorPartsV2(self, self._runner, kv_cache_config, offload)
        self._flags = RequestFlags(self._runner.max_num_reqs)
        self._runner.sampler.logits_processors.append(self._flags)
        if not self.config.is_plain:
            replace_rejection_sampler(self._runner, built.speculator.draft_logits)
        self._routes = Routes(self.config, built, self._flags)
        self._reader = BatchReader(self._runner, self._flags, built.logits_processing, built.tables)

    def capture(self) -> None:
        if self._graph_mode == CUDAGraphMode.NONE:
            return
        if not hasattr(self, "built"):
            # vLLM measures a few of its graphs before it allocates the KV cache.
            self.graph_bytes = self._estimated_graph_bytes()
        else:
            self.built.speculator.capture(self._graph_mode)

    def _estimated_graph_bytes(self) -> int:
        """Estimate the bytes of proposals' graphs as vLLM does for that many graphs of its own."""
        runner = self._runner
        has_adapters = runner.lora_config is not None and not self.level2_model.is_copy
        num_new_graphs = sum(
            num_graphs(
                self.config,
                min(self.max_num_reqs, self.config.max_speculating_seqs),
                runner.vllm_config.compilation_config.max_cudagraph_capture_size,
                self.model is not None,
                len(runner.lora_capture_cases) if has_adapters else 0,
            ).values()
        )
        samples = runner.cudagraph_manager._capture_mem_samples
        first_bytes = _extrapolate_full_graph_memory(samples, 1)
        return _extrapolate_full_graph_memory(samples, 1 + num_new_graphs) - first_bytes

    @property
    def counters(self):
        return self.built.speculator.counters

    @property
    def sent_counters(self):
        """Counters for /metrics, read without waiting for the device."""
        return self.built.speculator.known_counters

    def warm_up(self) -> None:
        """Compile proposals' kernels and, where the controller chooses, measure passes.

        Called after CUDA graphs are captured and vLLM has served its own warm-up requests, which
        are not counted.
        """
        self.built.speculator.reset_counters()
        self._report = IntervalReport(self.config.log_interval)
        self._num_nan_requests = 0
        self._measurements = self._warm_up_proposals(measures=bool(self.config.adaptive_keys))
        self._reports.set_measurements(self._measurements)

    def _warm_up_proposals(self, measures: bool) -> Measurements | None:
        return warm_up_proposals(self.config, self._runner, self.built, measures)

    def measured_passes(self, remeasure: bool) -> Measurements | None:
        return self._warm_up_proposals(measures=True) if remeasure else self._measurements

    def held_requests(self) -> dict[str, int]:
        return {"slots": len(self.built.slots), "disabled": len(self._disabled_requests)}

    def synchronize_times(self, synchronize: bool) -> None:
        self.built.speculator.times.synchronize = synchronize

    # Every step.

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled: torch.Tensor,  # [num_reqs]; 0 in the middle of a prefill
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: torch.Tensor,  # [max_num_reqs, 1], int64
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs=None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:  # [num_reqs, num_speculative_tokens], int64
        num_reqs = input_batch.num_reqs
        draft_tokens = self.draft_tokens[:num_reqs]
        if dummy_run:
            if skip_attn_for_dummy_run:
                self.compile_models()
            return draft_tokens
        speculator = self.built.speculator
        states = input_batch.idx_mapping[:num_reqs]
        self._release_finished(input_batch)
        if self.built.hidden_states is not None:
            read = states_read(last_hidden_states, aux_hidden_states)
            self._keep_states(self.built.hidden_states, input_batch, read)
        self._count_full_pass(input_batch, states, num_sampled)

        max_tokens = self.num_speculative_steps
        if num_speculative_tokens is not None:
            max_tokens = min(max_tokens, num_speculative_tokens)
        routes = self._routes.route_batch(input_batch, self.plan, max_tokens)
        states_np = input_batch.idx_mapping_np[:num_reqs]
        if not routes and not self._has_proposal[states_np].any():
            # No proposal before or now: the buffers hold padding already.
            if self.config.kv_offload_gib is not None:  # the full pass counts as well
                self.built.context.counters.note()
            self._handler.set_proposals(draft_tokens.fill_(PAD_TOKEN), None)
            return draft_tokens
        speculator.begin(draft_tokens, states)
        self._has_proposal[states_np] = False
        for route, plans in routes.items():
            batch = self._reader.read(input_batch, plans, num_sampled, last_sampled)
            with self._reports.timing(route):
                speculator.propose(route, batch, draft_tokens)
            self._has_proposal[batch.states] = True
            self._reports.add(batch.request_ids, self.built.rows.outcomes[: len(batch)])
        self.built.context.counters.note()
        if speculator.known_counters.num_nan_requests > self._num_nan_requests:
            self._report_nan_requests(speculator.known_counters.num_nan_requests)
        if time.monotonic() >= self._report.due_at:
            self._report.log(speculator.counters, logger)  # waits for the device
        self._handler.set_proposals(draft_tokens, speculator.num_proposed[states])
        return draft_tokens

    def _report_nan_requests(self, num_nan_requests: int) -> None:
        """Report requests whose logits had a NaN to the scheduler; waits for the device.

        The device has already ended their speculation. The host drops no rows by itself: ranks see
        a NaN at different times, and ranks that launch different rows would deadlock.
        """
        self._num_nan_requests = num_nan_requests
        slots = self.built.slots
        owners = slots.owners(self.built.rows.slot_disabled.nonzero()[:, 0].tolist())
        if not owners:  # the request finished before the host read the counter
            self._disabled_requests.warn("that has left", "level 1's or level 2's")
        for request_id in owners:
            self._disabled_requests.disable(request_id, "level 1's or level 2's")
        self._reports.add_disabled(owners)

    def begin_step(self, scheduler_output) -> None:
        """Begin a step: read its plan, and release the slots of disabled requests."""
        self.take_blocks_back(scheduler_output)
        self.plan = PLAN.of(scheduler_output)
        self.built.context.placeholders.add(scheduler_output.scheduled_new_reqs)
        for request_id in () if self.plan is None else self.plan.disabled:
            self._disabled_requests.disable(request_id, "level 1's or level 2's")
            self.built.slots.release(request_id)
        if self.built.adapters is not None:
            self.built.adapters.begin_step(scheduler_output.scheduled_spec_decode_tokens)
        self._reports.begin_step(None if self.plan is None else self.plan.number)

    def take_blocks_back(self, scheduler_output) -> None:
        """Remove blocks from block tables that the scheduler has taken back."""
        states, tables = self._runner.req_states.req_id_to_index, self._runner.block_tables
        for request_id, num_blocks in (BLOCKS_KEPT.of(scheduler_output) or {}).items():
            if request_id in states:
                tables.num_blocks.np[:, states[request_id]] = num_blocks

    def end_step(self, output):
        return self._reports.attach_to(output)

    def _release_finished(self, input_batch) -> None:
        """Release slots of requests that left the runner, or whose id is that of a new request.

        Preempted requests leave the runner too. A request that prefills is new or has come back.
        """
        slots = self.built.slots
        request_ids = [*slots, *self._disabled_requests]
        if not request_ids:
            return
        prefilling = {
            request_id: num_computed
            for request_id, num_computed, is_prefilling in zip(
                input_batch.req_ids,
                input_batch.num_computed_prefill_tokens_np.tolist(),
                input_batch.is_prefilling_np,
            )
            if is_prefilling
        }
        running = self._runner.req_states.req_id_to_index
        for request_id in request_ids:
            is_new = request_id in prefilling and (
                request_id not in slots or slots[request_id].num_read != prefilling[request_id]
            )
            if request_id not in running or is_new:
                slots.release(request_id)
                self._disabled_requests.discard(request_id)

    def _keep_states(
        self, states: HiddenStatesV2, input_batch, aux: Sequence[torch.Tensor]
    ) -> None:
        """Keep the states of a full pass, of requests for which a slot is free."""
        slots, num_reqs = self.built.slots, input_batch.num_reqs
        request_ids = input_batch.req_ids[:num_reqs]
        max_tokens = self._flags.max_tokens[input_batch.idx_mapping_np[:num_reqs]]
        new_ids = [
            request_id
            for request_id, limit in zip(request_ids, max_tokens)
            if limit and request_id not in slots and request_id not in self._disabled_requests
        ]
        planned = {} if self.plan is None else self.plan.proposing
        new_ids.sort(key=lambda request_id: request_id not in planned)
        # The scheduler counts on slots for the requests that it plans for.
        num_planned = sum(request_id in planned for request_id in new_ids)
        slots.release_without_proposal(num_planned - slots.num_free, kept=planned)
        new_ids = new_ids[: slots.num_free]
        self.built.context.take_slots(new_ids)
        lengths = input_batch.num_scheduled_tokens[:num_reqs]
        computed = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy() - lengths
        num_read = input_batch.num_computed_prefill_tokens_np[:num_reqs] + lengths
        indices = np.full(num_reqs, -1)
        for row, request_id in enumerate(request_ids):
            if request_id in slots:
                slot = slots[request_id]
                indices[row], slot.num_read = slot.index, int(num_read[row])
                if request_id in new_ids:
                    slot.first_known = int(computed[row])
        states.add_full_pass(aux, input_batch.positions, lengths, indices)

    def _count_full_pass(self, input_batch, states, num_sampled) -> None:
        num_drafts = input_batch.num_draft_tokens_per_req
        if num_drafts is None or not self._has_proposal[input_batch.idx_mapping_np].any():
            return
        # Prefills may have placeholders of drafts, which do not count.
        is_decode = ~input_batch.is_prefilling_np[: len(num_drafts)]
        on_device = async_tensor_h2d((num_drafts * is_decode).astype(np.int32), device=self.device)
        self.built.speculator.count_full_pass(on_device, states, num_sampled)
