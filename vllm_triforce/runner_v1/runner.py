"""Adapter of Model Runner V1: fills a ``DraftBatch`` and returns the proposal.

vLLM's runner requires a ``DraftModelProposer`` (vllm/v1/spec_decode/draft_model.py). Per step it
calls ``prepare_next_token_ids_padded``, ``prepare_inputs_padded`` and ``propose``. Its rejection
sampler gets the draft distributions from ``runner_v1/draft_probs.py``.
"""

import time
from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.draft_sources import HEAD_SOURCE, SOURCES
from vllm_triforce.controller import Controller, CostModel, Measurements
from vllm_triforce.controller.describe import describe
from vllm_triforce.core.messages import DRAFTS, TENANTS, StepDrafts
from vllm_triforce.core.models import with_own_layers
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.runner_v1.batch import AdapterSwitch, DraftBatch, Proposal, RunnerBatch
from vllm_triforce.runner_v1.calibration import Calibration, broadcast_from_first_rank
from vllm_triforce.runner_v1.draft_probs import DraftProbsStore
from vllm_triforce.runner_v1.levels import Level1
from vllm_triforce.runner_v1.plain_steps import PlainSteps
from vllm_triforce.runner_v1.rejection import support_all_sampling_params
from vllm_triforce.runner_v1.retrieval import build_level2
from vllm_triforce.runner_v1.sampling import InnerNoise
from vllm_triforce.runner_v1.sources.head import Head, HiddenStates
from vllm_triforce.runner_v1.sources.source import SourceParts
from vllm_triforce.runner_v1.speculator import SpeculatorV1
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")

# Plain steps after which a batch without eligible requests is examined again, unless only short
# contexts made its requests ineligible.
_NUM_BACKOFF_STEPS = 8


class RunnerAdapterV1(RunnerAdapter, DraftModelProposer):
    """TriForce in place of vLLM's draft model."""

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(with_own_layers(vllm_config), device, runner)
        self.set_up(runner, config, draft_model)
        self._adapters = AdapterSwitch(runner) if vllm_config.lora_config is not None else None
        self.counters = self.sent_counters = LevelCounters()
        self._requests: dict[str, Any] = {}
        """Requests with state in the speculator, by id."""
        self._routes: dict[str, str] = {}
        """Route of each request's last proposal."""
        self._outcome: tuple[list[int], list[list[int]]] = [], []
        """Number of valid tokens and token ids of the step, per row."""
        self._num_scheduled_drafts: list[int] = []
        self._report = IntervalReport(config.log_interval)

    # Start-up, in the order of the calls.

    def load_model(self, target_model) -> None:
        """Load the models of levels 1 and 2, where they are not the target, by vLLM's loader."""
        self._target = target_model

        def load_draft() -> None:
            if self.config.has_head:
                self.model = load_eagle_model(target_model, self.vllm_config)
            else:
                self.model = self._get_model()

        self.load_models(target_model, load_draft)

    def dummy_run(self, num_tokens, *args, **kwargs) -> None:
        """Compile the draft and level 2's copy during the target's warm-up."""
        self.compile_models()

    def initialize_attn_backend(self, kv_cache_config, kernel_block_sizes=None) -> None:
        """Do nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def allocate(self, kv_cache_config, offload=None) -> None:
        """Build the speculator once the target's KV cache exists."""
        # vLLM's runner stops drafting for the whole batch once one request exceeds this length.
        # RunnerBatch.max_proposal_len() limits each request by itself.
        max_len = self._runner.max_model_len + self.config.num_speculative_tokens + 1
        swaps.DRAFTER_LENGTH.set(self._runner, max_len)
        # The runner has its batch and its rejection sampler by now.
        self._rejection_sampler = support_all_sampling_params(
            self._runner, self.vllm_config, self.device, self._routes
        )
        tables = self._runner.input_batch.block_table.block_tables
        self._block_sizes = [table.block_size for table in tables]
        self._num_blocks = kv_cache_config.num_blocks
        self.speculator = self._build_speculator(kv_cache_config)
        speculator = self.speculator
        self._draft_probs = DraftProbsStore(self.counters.add_boundary_fault)
        self._batch = RunnerBatch(self._runner, self.config, speculator.disabled_requests)
        swaps.DRAFT_PROBS.set(self._runner, self._draft_probs_of)
        head = speculator.level1.sources.get(HEAD_SOURCE)
        self._states = head.states if isinstance(head, Head) else None
        self._preferred: Container[str] = self._requests if self._states is None else self._states
        """Requests that are speculated on before others."""
        on_new_blocks = None
        if speculator.level2 is not None:
            on_new_blocks = speculator.level2.invalidate_summaries
            if self.vllm_config.model_config.uses_mrope:
                speculator.level2.position_deltas = self._batch.position_deltas
            if self._adapters is not None and not self.level2_model.is_copy:
                speculator.level2.before_pass = self._adapters.before_pass
            if self._states is not None:
                speculator.level2.after_pass = self._states.add
        self._steps = PlainSteps(
            self._runner,
            speculator.controller,
            on_new_blocks=on_new_blocks,
            on_finished=self._forget_finished,
            on_states=None if self._states is None else partial(self._add_states, self._states),
        )

    def _build_speculator(self, kv_cache_config) -> SpeculatorV1:
        vllm_config, config = self.vllm_config, self.config
        model_config, level2 = vllm_config.model_config, None
        if config.uses_level2:
            level2, config = build_level2(
                config,
                self.level2_model,
                self.target_layers,
                kv_cache_config,
                self._runner.attn_groups,
                self._block_sizes,
                model_config.dtype,
            )
        draft = getattr(self, "model", None)
        parts = SourceParts(vllm_config, self.config, draft, self.draft_layers)
        sources = [SOURCES[name].build(parts) for name in config.sources]
        traits = [source.traits() for source in sources]
        controller = Controller(config, traits, count_step=self.counters.add_step_seconds)
        replica = vllm_config.parallel_config.data_parallel_index
        return SpeculatorV1(
            Level1(sources, controller, model_config.get_vocab_size()),
            level2,
            controller,
            InnerNoise(model_config.seed, replica),
            self.counters,
        )

    def calibrate(self) -> None:
        """Measure the passes and start the controller, if it has anything to choose."""
        controller = self.speculator.controller
        if self.config.adaptive_keys:
            has_ranks = get_tp_group().world_size > 1
            adopt = broadcast_from_first_rank if has_ranks else None
            controller.start(CostModel(self._measure()), adopt)
            logger.info("%s", describe(controller))

    def measured_passes(self, remeasure: bool) -> Measurements | None:
        if remeasure:
            return self._measure()
        model = self.speculator.controller.measured
        return None if model is None else model.measured

    def _measure(self) -> Measurements:
        calibration = Calibration(
            self.speculator,
            self.config,
            self._target,
            self._runner,
            self._block_sizes,
            self._num_blocks,
            None if self._adapters is None else self._adapters.before_pass,
        )
        with torch.inference_mode():
            return calibration.run()

    def held_requests(self) -> dict[str, int]:
        held = self.speculator.held_requests()
        return {**held, "draft probs": len(self._draft_probs), "runner": len(self._requests)}

    # Every step.

    def begin_step(self, scheduler_output) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self._batch.tenants.pop(request_id, None)
        self._batch.tenants.update(TENANTS.of(scheduler_output) or {})

    def end_step(self, output):
        """Attach the step's drafts to its output, so that no call fetches them."""
        if getattr(output, "req_ids", None):  # vLLM's empty output is shared by all steps
            drafts = self._runner.take_draft_token_ids()
            expects_proposals = not self.speculator.controller.backoff.rests_next
            DRAFTS.attach(output, StepDrafts(drafts, expects_proposals))
        return output

    def prepare_next_token_ids_padded(self, sampled_token_ids, *args):
        """Note the step's tokens: proposals are made from lists."""
        newest_ids, counts = super().prepare_next_token_ids_padded(sampled_token_ids, *args)
        self._outcome = counts.tolist(), sampled_token_ids.tolist()
        return newest_ids, counts

    def prepare_inputs_padded(self, common_attn_metadata, spec_decode_metadata, valid_counts):
        """Note the number of drafts that the step verified."""
        self._num_scheduled_drafts = spec_decode_metadata.num_draft_tokens
        return super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_counts
        )

    def propose(
        self,
        num_speculative_tokens,
        target_token_ids,
        target_positions,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
        common_attn_metadata,
        sampling_metadata,
        mm_embed_inputs=None,
        num_rejected_tokens_gpu=None,
        slot_mappings=None,
    ) -> Any:
        """Propose draft tokens for each row of the batch, none where they would not pay.

        Returns:
            Lists of token ids, as of vLLM's proposers on the host; its draft models return a
            tensor.
        """
        self._forget_finished()
        counts, sampled = self._outcome
        self._count_full_pass(counts)
        num_rejected = num_rejected_tokens_gpu.tolist()
        seq_lens = common_attn_metadata.seq_lens.tolist()
        computed = [seq_len - rejected for seq_len, rejected in zip(seq_lens, num_rejected)]
        max_lens = [
            self._batch.max_proposal_len(row, n, num_speculative_tokens) if counts[row] else 0
            for row, n in enumerate(computed)
        ]
        eligible = [row for row, max_len in enumerate(max_lens) if max_len > 0]
        rows = self._proposing_rows(eligible)
        # If prompts leave no room for drafts, later steps may have room.
        if not eligible and num_speculative_tokens:
            self._begin_backoff(computed, counts)
        for row in rows:
            request_id = self._runner.input_batch.req_ids[row]
            self._requests[request_id] = self._runner.requests[request_id]
        result: list[list[int]] = [[] for _ in counts]
        if rows:
            start = time.perf_counter()
            batch = self._batch.draft_batch(
                rows, computed, max_lens, sampled, counts, sampling_metadata
            )
            try:
                proposal = self.speculator.propose(batch)
            finally:
                if self._adapters is not None and not self.level2_model.is_copy:
                    self._adapters.restore()
            self._steps.propose_seconds += time.perf_counter() - start
            for row, token_ids in zip(rows, proposal.token_ids):
                result[row] = token_ids
            self._export_proposal(batch, proposal)
            self._routes.update(zip(batch.request_ids, proposal.routes))
        self._limit_backoff(eligible, computed, counts)
        if time.monotonic() >= self._report.due_at:
            self._report.log(self.counters, logger)
        return result

    def _proposing_rows(self, eligible: list[int]) -> list[int]:
        rows = self._batch.limit_rows(eligible, self._preferred, self.config.max_speculating_seqs)
        if self._steps.delays_proposals:
            return [row for row in rows if self._batch.has_seed(row)]
        return rows

    def _begin_backoff(self, computed: list[int], counts: list[int]) -> None:
        """Start plain steps until a request of the batch may become eligible."""
        if not all(counts):
            return  # a prompt in chunked prefill grows by more than a token per step
        # Contexts grow by a token per step, and a batch that changes ends the plain steps anyway.
        num_missing = min(self.config.min_context - n for n in computed)
        num_steps = num_missing if num_missing > 0 else _NUM_BACKOFF_STEPS
        self.speculator.controller.backoff.begin(num_steps)

    def _limit_backoff(self, eligible: list[int], computed: list[int], counts: list[int]) -> None:
        """End plain steps at the first step in which a seeded request becomes eligible.

        Its samples must not depend on how long other requests decode plainly.
        """
        for row, num_computed in enumerate(computed):
            if (
                row not in eligible
                and self._batch.has_seed(row)
                and not self._batch.is_never_speculated_on(row)
            ):
                num_missing = self.config.min_context - num_computed if counts[row] else 1
                self.speculator.controller.backoff.at_most(max(1, num_missing))

    def _export_proposal(self, batch: DraftBatch, proposal: Proposal) -> None:
        disabled = self.speculator.disabled_requests
        is_greedy = batch.sampling.is_greedy.tolist()
        for row, request_id in enumerate(batch.request_ids):
            if is_greedy[row]:  # level 3 compares the argmax
                self._draft_probs.forget(request_id)
                continue
            token_ids, num_planned = proposal.token_ids[row], proposal.num_planned[row]
            if request_id in disabled:  # a NaN ended the proposal before the next token was drawn
                num_planned = len(token_ids)
            self._draft_probs.export_proposal(
                request_id, token_ids, proposal.probs[row], num_planned
            )

    def _draft_probs_of(self, spec_decode_metadata) -> torch.Tensor | None:
        """Return q of the step's draft tokens, for level 3's test.

        Replaces the runner's ``_get_spec_decode_draft_probs``, which drops all distributions if one
        request had to wait a step.
        """
        if not len(self._draft_probs) or self._runner.input_batch.all_greedy:
            return None
        return self._draft_probs.take(
            self._runner.input_batch.req_ids,
            spec_decode_metadata.num_draft_tokens,
            spec_decode_metadata.draft_token_ids.tolist(),
        )

    def _count_full_pass(self, counts: list[int]) -> None:
        controller = self.speculator.controller
        num_drafts = self._num_scheduled_drafts
        probs = self._rejection_sampler.acceptance_by_row() if controller.chooses else None
        for row, request_id in enumerate(self._runner.input_batch.req_ids[: len(num_drafts)]):
            if num_drafts[row] and counts[row]:
                num_accepted = counts[row] - 1
                controller.observe_full_pass(
                    request_id,
                    num_drafts[row],
                    num_accepted,
                    probs=None if probs is None else probs[row],
                )
                self.counters.add_full_pass(num_drafts[row], num_accepted)

    def _forget_finished(self) -> None:
        running = self._runner.requests
        if self._states is not None:
            self._states.keep(running)
        for request_id, request in list(self._requests.items()):
            if running.get(request_id) is not request:  # it left, or its id has a new owner
                for source in self.speculator.level1.sources.values():
                    source.add_answer(request_id, request.output_token_ids)
                self.speculator.release(request_id)
                self._draft_probs.forget(request_id)
                self._routes.pop(request_id, None)
                del self._requests[request_id]

    def _add_states(
        self,
        states: HiddenStates,
        scheduler_output,
        aux: Sequence[torch.Tensor],  # [num_tokens, hidden_size] of each layer
    ) -> None:
        """Add the states of a full pass, of requests that may be speculated on."""
        for request in scheduler_output.scheduled_new_reqs:
            states.release(request.req_id)
        batch, scheduled = self._runner.input_batch, scheduler_output.num_scheduled_tokens
        rows = self._batch.rows_with_states(states, self.config.max_speculating_seqs)
        states.hold([batch.req_ids[row] for row in rows])
        states.add(
            batch.req_ids,
            batch.num_computed_tokens_cpu[: batch.num_reqs].tolist(),
            [scheduled[request_id] for request_id in batch.req_ids],
            aux,
            [self._runner.requests[request_id].num_tokens for request_id in batch.req_ids],
        )
