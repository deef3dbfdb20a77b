"""Model Runner V2: fills a ``BatchV2`` and hands the proposal back."""

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import _extrapolate_full_graph_memory

from vllm_triforce.attention.query_recorder import StaticQueryRecorder
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import LEVELS
from vllm_triforce.core.draft_cache import warm_up
from vllm_triforce.core.eligibility import DisabledRequests
from vllm_triforce.core.kv_groups import attention_layers
from vllm_triforce.core.plan import StepPlan, plan_of
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.runner_v2.build import SpeculatorBuild
from vllm_triforce.runner_v2.calibration import warm_up_proposals
from vllm_triforce.runner_v2.decode_graphs import disable_recording_in_plain_graphs
from vllm_triforce.runner_v2.graph_sizes import num_graphs
from vllm_triforce.runner_v2.read_batch import read_batch
from vllm_triforce.runner_v2.reports import Reports
from vllm_triforce.runner_v2.request_flags import RequestFlags, install_request_listener
from vllm_triforce.runner_v2.routes import Routes
from vllm_triforce.runner_v2.speculator import SpeculatorV2

logger = init_logger("vllm.triforce")


class TriForceSpeculatorV2(SpeculatorV2):
    """TriForce in the place of vLLM's draft model.

    The full pass may verify more tokens than were proposed: an asynchronous scheduler learns
    nothing of the proposals and has as many verified as were planned. What was not proposed is
    PAD_TOKEN, a token of the vocabulary, as the full pass looks up its embedding. The outer test
    is told -1 instead (``kernels/proposals.py``): it refuses that and draws from the target.

    ``propose()`` never waits for the device: who proposes how much by how many rounds is planned
    before the step. A scheduler that is not asynchronous waits once, for the tokens.
    """

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(vllm_config, device, runner, config, draft_model)
        self._built: SpeculatorBuild | None = None
        self._graph_mode = CUDAGraphMode.NONE
        self._report = IntervalReport(config.log_interval)
        self._facts: RequestFlags | None = None
        self._routes: Routes | None = None
        self._disabled_requests = DisabledRequests()
        self._num_faults = 0
        self._plan: StepPlan | None = None
        self._reports = Reports(device)
        self._measured: Measurements | None = None
        # By state: a proposal, and distributions, may still be there.
        self._has_proposal = np.zeros(self.max_num_reqs, dtype=bool)

    # Start-up, in the order of the calls.

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Level 1 and level 2 are captured wherever vLLM captures anything: they call kernels of
        their own, so what the backend's can be captured for is no matter."""
        super().init_cudagraph_manager(cudagraph_mode)
        if cudagraph_mode != CUDAGraphMode.NONE:
            self._graph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        else:
            self._graph_mode = CUDAGraphMode.NONE

    def allocate(self, kv_cache_config, offload=None) -> None:
        """Builds the levels, once the target's KV cache exists."""
        self._num_blocks = kv_cache_config.num_blocks
        layers = attention_layers(self.vllm_config)
        draft_layers = {name: layers[name] for name in layers if name in self.draft_layer_names}
        self._built = SpeculatorBuild(
            vllm_config=self.vllm_config,
            config=self.config,
            runner=self._runner,
            target=self._target,
            target_layers=self.target_layers,
            draft=self.model,
            draft_layers=draft_layers,
            kv_cache_config=kv_cache_config,
            vocab_size=self.vocab_size,
            device=self.device,
            offload=offload,
        )
        self._facts = install_request_listener(self._runner, self._built.triforce.handed_up)
        disable_recording_in_plain_graphs(self._runner, self.recorder)
        self._routes = Routes(self.config, self._built, self._facts)

    def capture(self) -> None:
        if self._graph_mode == CUDAGraphMode.NONE:
            return
        if self._built is None:
            # vLLM measures a few of its graphs, before there is a KV cache of full size.
            self.graph_bytes = self._estimated_graph_bytes()
        else:
            self._built.capture(self._graph_mode)

    def _estimated_graph_bytes(self) -> int:
        """As many as vLLM reckons for as many graphs more of its own."""
        runner = self._runner
        number = sum(
            num_graphs(
                self.config,
                min(self.max_num_reqs, self.config.max_speculating_seqs),
                self.vllm_config.compilation_config.max_cudagraph_capture_size,
                self.model is not None,
                len(runner.lora_capture_cases) if runner.lora_config else 0,
            ).values()
        )
        samples = runner.cudagraph_manager._capture_mem_samples
        measured = _extrapolate_full_graph_memory(samples, 1)
        return _extrapolate_full_graph_memory(samples, 1 + number) - measured

    @property
    def recorder(self) -> StaticQueryRecorder:
        return self._built.recorder

    @property
    def counters(self):
        return self._built.triforce.counters

    @property
    def sent_counters(self):
        """What goes to /metrics: it must not wait for the device."""
        return self._built.triforce.known_counters

    def warm_up(self) -> None:
        """Compiles what proposals need, before a request waits for it; and measures, where there is
        something to choose. Behind the capture of CUDA graphs."""
        self._measured = self._warm_up_proposals(measures=bool(self.config.adaptive_keys))
        self._reports.measured(self._measured)

    def _warm_up_proposals(self, measures: bool) -> Measurements | None:
        return warm_up_proposals(
            self.config, self._runner, self._built, self._num_blocks, self.device, measures
        )

    def measured_passes(self, anew: bool) -> Measurements | None:
        return self._warm_up_proposals(measures=True) if anew else self._measured

    def held_requests(self) -> dict[str, int]:
        return {"slots": len(self._built.slots), "disabled": len(self._disabled_requests)}

    def synchronize_times(self, synchronize: bool) -> None:
        self._built.triforce.times.synchronize = synchronize

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
            self._warm_up(skip_attn_for_dummy_run)
            return draft_tokens
        triforce = self._built.triforce
        states = input_batch.idx_mapping[:num_reqs]
        self._forget_finished(input_batch)
        self._count_full_pass(input_batch, states, num_sampled)

        most = self.num_speculative_steps
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        routes = self._routes.of_batch(input_batch, self._plan, most)
        hosted_states = input_batch.idx_mapping_np[:num_reqs]
        if not routes and not self._has_proposal[hosted_states].any():
            # Nothing was proposed before, nothing is now: all is padding already.
            return self.propose_nothing(num_reqs)
        triforce.begin(draft_tokens, states)
        self._has_proposal[hosted_states] = False
        for route, plans in routes.items():
            rows = np.array(list(plans))
            batch = read_batch(
                self._runner,
                self._facts,
                self._built.shaping,
                input_batch,
                rows,
                list(plans.values()),
                num_sampled,
                last_sampled,
                self._built.tables,
            )
            with self._built.recorder.pausing():
                if route == LEVELS:
                    triforce.propose(batch, draft_tokens)
                else:
                    triforce.propose_directly(route, batch, draft_tokens)
            self._has_proposal[hosted_states[rows]] = True
            self._reports.add(batch.request_ids, self._built.rows.outcomes[: len(batch)])
        triforce.note_counters()
        if triforce.known_counters.num_nan_requests > self._num_faults:
            self._report_faults(triforce.known_counters.num_nan_requests)
        self._report.log_if_due(lambda: triforce.counters, logger)
        self._handler.proposed(draft_tokens, triforce.num_proposed[states])
        return draft_tokens

    def _report_faults(self, num_faults: int) -> None:
        """Tells the scheduler whose logits had a NaN; the device has stopped to speculate on them
        by itself.

        Nothing else follows here: each rank sees it at a time of its own, and ranks that launch
        different rows wait for each other for ever. The host waits for the device, as often as
        there is a NaN.
        """
        self._num_faults = num_faults
        slots = self._built.slots
        owners = slots.owners_of(self._built.rows.faults.slot.nonzero()[:, 0].tolist())
        if not owners:  # the request has left before the host heard of it
            self._disabled_requests.warn("that has left", "level 1's or level 2's")
        for request_id in owners:
            self._disabled_requests.add(request_id, "level 1's or level 2's")
        self._reports.disabled(owners)

    def _warm_up(self, is_profile: bool) -> None:
        if is_profile and self.model is not None:
            warm_up(self.model, self.vllm_config, self.device)

    def begin_step(self, scheduler_output) -> None:
        """A step begins: what is planned of it."""
        super().begin_step(scheduler_output)
        self._plan = plan_of(scheduler_output)
        for request_id in () if self._plan is None else self._plan.disabled:
            self._disabled_requests.add(request_id, "level 1's or level 2's")
            self._built.slots.release(request_id)
        if self._built.adapters is not None:
            self._built.adapters.begin_step(scheduler_output.scheduled_spec_decode_tokens)
        # Only level 2 selects, and by the queries of the full pass that it follows.
        routes = {LEVELS} if self._plan is None else self._plan.routes
        self.recorder.expect(selection=LEVELS in routes)
        self._reports.begin(None if self._plan is None else self._plan.number)

    def end_step(self, output):
        """``output`` with what is known of the step before."""
        return self._reports.send(output)

    def _forget_finished(self, input_batch) -> None:
        """Releases what is kept for requests that have left, or whose name has a new owner.

        A preempted request leaves the runner too; who prefills has just come, or come back.
        """
        slots = self._built.slots
        known = [*slots.request_ids(), *self._disabled_requests]
        if not known:
            return
        prefilling = {
            name for name, new in zip(input_batch.req_ids, input_batch.is_prefilling_np) if new
        }
        alive = self._runner.req_states.req_id_to_index
        for request_id in known:
            if request_id not in alive or request_id in prefilling:
                slots.release(request_id)
                self._disabled_requests.discard(request_id)

    def _count_full_pass(self, input_batch, states, num_sampled) -> None:
        scheduled = input_batch.num_draft_tokens_per_req
        if scheduled is None or not self._has_proposal[input_batch.idx_mapping_np].any():
            return
        # A prefill may be padded with placeholders, which do not count.
        decodes = ~input_batch.is_prefilling_np[: len(scheduled)]
        counted = async_tensor_h2d((scheduled * decodes).astype(np.int32), device=self.device)
        self._built.triforce.count_full_pass(counted, states, num_sampled)
