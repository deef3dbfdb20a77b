"""Model Runner V1: fills a ``DraftBatch`` and hands the proposal back.

The runner insists on a ``DraftModelProposer`` (vllm/v1/spec_decode/draft_model.py) and calls,
per step: ``prepare_next_token_ids_padded``, ``prepare_inputs_padded``, ``propose``. What its
rejection sampler is told of the drafts comes from ``runner_v1/draft_probs.py``.
"""

import time

import torch
from vllm.logger import init_logger
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller import CostModel, Measurements
from vllm_triforce.controller.controller import describe
from vllm_triforce.core.draft_cache import loading_draft, warm_up
from vllm_triforce.core.kv_groups import attention_layers
from vllm_triforce.core.runner_adapter import RunnerAdapter
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.runner_v1.adapters import AdapterSwitch
from vllm_triforce.runner_v1.batch import RunnerBatch
from vllm_triforce.runner_v1.build import BuiltSpeculator
from vllm_triforce.runner_v1.calibration import Calibration, broadcast_from_first_rank
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.draft_probs import DraftProbsStore
from vllm_triforce.runner_v1.plain_steps import PlainSteps
from vllm_triforce.runner_v1.rejection import support_all_sampling_params
from vllm_triforce.vllm_patches import swaps

logger = init_logger("vllm.triforce")

# Steps until a batch that has nobody to speculate on, for another reason than short contexts, is
# looked at again.
_REST = 8


class TriForceProposer(RunnerAdapter, DraftModelProposer):
    """TriForce in the place of vLLM's draft model."""

    def __init__(self, vllm_config, device, runner, config: ResolvedConfig, draft_model) -> None:
        super().__init__(vllm_config, device, runner)
        self.config = config
        self._runner = runner
        self._draft_model = draft_model
        self._adapters = AdapterSwitch(runner) if vllm_config.lora_config is not None else None
        self.draft_layer_names: set[str] = set()
        self._built: BuiltSpeculator | None = None
        self._requests: dict[str, object] = {}
        self._outcome: tuple[list[int], list[list[int]]] | None = None
        self._num_scheduled_drafts: list[int] = []
        self._report = IntervalReport(config.log_interval)
        self._steps: PlainSteps | None = None

    # Start-up, in the order of the calls.

    def load_model(self, target_model) -> None:
        self._target = target_model
        self.target_layers = attention_layers(self.vllm_config)
        if self._draft_model is None:
            return
        with loading_draft(self._draft_model):
            self.model = self._get_model()
        everything = attention_layers(self.vllm_config)
        self.draft_layer_names = everything.keys() - self.target_layers.keys()

    def dummy_run(self, num_tokens, *args, **kwargs) -> None:
        """Compiles the draft along with the target's own warm-up."""
        if self._draft_model is not None:
            warm_up(self.model, self.vllm_config, self.device)

    def initialize_attn_backend(self, kv_cache_config, kernel_block_sizes=None) -> None:
        """Nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def allocate(self, kv_cache_config, offload=None) -> None:
        """Builds the levels, once the target's KV cache exists."""
        # The runner stops drafting for the whole batch once one request passes this; whether
        # a request still fits is decided per request, in RunnerBatch.room().
        longest = self._runner.max_model_len + self.config.num_speculative_tokens + 1
        swaps.DRAFTER_LENGTH.set(self._runner, longest)
        # The runner has made its batch and its rejection sampler by now.
        support_all_sampling_params(self._runner, self.vllm_config, self.device)
        tables = self._runner.input_batch.block_table.block_tables
        self._block_sizes = [table.block_size for table in tables]
        self._built = BuiltSpeculator(
            vllm_config=self.vllm_config,
            config=self.config,
            target=self._target,
            target_layers=self.target_layers,
            draft=getattr(self, "model", None),
            draft_layers={
                name: layer
                for name, layer in attention_layers(self.vllm_config).items()
                if name in self.draft_layer_names
            },
            kv_cache_config=kv_cache_config,
            attn_groups=self._runner.attn_groups,
            block_sizes=self._block_sizes,
            device=self.device,
        )
        speculator = self._built.speculator
        self.backoff = speculator.controller.backoff
        self._boundary = DraftProbsStore(self.counters.add_boundary_fault)
        recorder, disabled = self._built.recorder, speculator.disabled_requests
        self._reader = RunnerBatch(self._runner, self.config, recorder, disabled, self.device)
        swaps.DRAFT_PROBS.set(self._runner, self._draft_probs_of)
        if self._adapters is not None:
            self._built.speculator.level2.before_pass = self._adapters.before_pass
        self._num_blocks = kv_cache_config.num_blocks
        self._steps = PlainSteps(
            self._runner,
            speculator.controller,
            recorder,
            on_new_blocks=speculator.level2.invalidate_summaries,
            on_finished=self._forget_finished,
        )

    def calibrate(self) -> None:
        """Measures the passes, where the controller has something to choose, and begins."""
        controller = self._built.speculator.controller
        if self.config.choices:
            controller.start(CostModel(self._measure()), adopt=broadcast_from_first_rank)
            logger.info("%s", describe(controller))

    def measured_passes(self, anew: bool) -> Measurements | None:
        model = self._built.speculator.controller.measured
        known = None if model is None else model.measured
        return self._measure() if anew else known

    def _measure(self) -> Measurements:
        built = self._built
        parts = built, self._target, self.vllm_config, self._runner.attn_groups, self._block_sizes
        calibration = Calibration(*parts, self._num_blocks, self.device, broadcast_from_first_rank)
        with built.recorder.pausing(), torch.inference_mode():
            return calibration.run()

    @property
    def counters(self):
        return self._built.counters

    sent_counters = counters

    def held_requests(self) -> dict[str, int]:
        held = self._built.speculator.held_requests()
        return {**held, "boundary": len(self._boundary), "runner": len(self._requests)}

    # Every step.

    def prepare_next_token_ids_padded(self, sampled_token_ids, requests, batch, discard_mask):
        """As vLLM's, on the host: the proposal is made from lists."""
        sampled = sampled_token_ids.tolist()
        counts, newest = [], []
        is_discarded = discard_mask[: len(sampled)].tolist()
        for row, tokens in enumerate(sampled):
            # What was rejected is -1, and stands behind what was accepted.
            count = 0 if is_discarded[row] else sum(0 <= t < batch.vocab_size for t in tokens)
            counts.append(count)
            if count:
                newest.append(tokens[count - 1])
            else:
                place = int(batch.num_tokens_no_spec[row]) - 1
                newest.append(requests[batch.req_ids[row]].get_token_id(place))
        self._outcome = counts, sampled
        return self._int_tensor(newest), self._int_tensor(counts)

    def prepare_inputs_padded(self, common_attn_metadata, spec_decode_metadata, valid_counts):
        """As vLLM's; the inputs of a draft's pass that it returns besides are not needed."""
        self._num_scheduled_drafts = spec_decode_metadata.num_draft_tokens
        counts, _ = self._outcome
        drafted = self._num_scheduled_drafts
        rejected = [n + 1 - count if n else 0 for n, count in zip(drafted, counts)]
        return common_attn_metadata, None, self._int_tensor(rejected)

    def _int_tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

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
    ) -> list[list[int]]:
        """A list of draft tokens per request of the batch, empty where none are worth it."""
        self._forget_finished()
        counts, sampled = self._outcome
        self._count_full_pass(counts)
        num_rejected = num_rejected_tokens_gpu.tolist()
        ends = common_attn_metadata.seq_lens.tolist()
        computed = [end - rejected for end, rejected in zip(ends, num_rejected)]
        room = [
            self._reader.room(row, n, num_speculative_tokens) if counts[row] else 0
            for row, n in enumerate(computed)
        ]
        able = [row for row, most in enumerate(room) if most > 0]
        rows = self._reader.at_a_time(able, self._requests, self.config.max_speculating_seqs)
        if not rows:
            self._rest(computed, counts)
        elif self._built.speculator.controller.chooses and self._reader.gives_first_token(counts):
            # What a seeded request samples must not depend on when others arrive.
            rows = [row for row in rows if self._reader.has_seed(row)]
        for row in rows:
            request_id = self._runner.input_batch.req_ids[row]
            self._requests[request_id] = self._runner.requests[request_id]
        result: list[list[int]] = [[] for _ in counts]
        if rows:
            start = time.perf_counter()
            sampling = self._reader.sampling(rows, sampling_metadata)
            batch = self._reader.draft_batch(
                rows, computed, room, num_rejected, sampled, counts, sampling
            )
            try:
                with self._built.recorder.pausing():
                    proposal = self._built.speculator.propose(batch)
            finally:
                if self._adapters is not None:
                    self._adapters.restore()
            self._steps.add_propose_seconds(time.perf_counter() - start)
            for row, tokens in zip(rows, proposal.token_ids):
                result[row] = tokens
            self._export_proposal(batch, proposal)
        self._let_no_seeded_request_wait(able, computed, counts)
        self._report.log_if_due(lambda: self.counters, logger)
        return result

    def _let_no_seeded_request_wait(self, rows, computed, counts) -> None:
        """What a seeded request samples must not depend on how long others rest: there is a
        decision in the first step in which it may be speculated on."""
        for row, num_computed in enumerate(computed):
            if (
                row not in rows
                and self._reader.has_seed(row)
                and not self._reader.is_never_speculated_on(row)
            ):
                missing = self.config.min_context - num_computed if counts[row] else 1
                self._built.speculator.controller.backoff.at_most(max(1, missing))

    def _export_proposal(self, batch: DraftBatch, proposal: Proposal) -> None:
        disabled = self._built.speculator.disabled_requests
        is_greedy = batch.sampling.is_greedy.tolist()
        for row, request_id in enumerate(batch.request_ids):
            if proposal.probs is None or is_greedy[row] or request_id in disabled:
                # Nothing but the argmax counts; or a NaN ended the proposal early.
                self._boundary.forget(request_id)
            else:
                self._boundary.export_proposal(
                    request_id,
                    proposal.token_ids[row],
                    proposal.probs[row],
                    proposal.num_planned[row],
                )

    def _draft_probs_of(self, spec_decode_metadata) -> torch.Tensor | None:
        """In the place of the runner's ``_get_spec_decode_draft_probs``, which forgets them all
        where one request had to wait a step."""
        if not len(self._boundary) or self._runner.input_batch.all_greedy:
            return None
        return self._boundary.take(
            self._runner.input_batch.req_ids,
            spec_decode_metadata.num_draft_tokens,
            spec_decode_metadata.draft_token_ids.tolist(),
        )

    def _rest(self, computed: list[int], counts: list[int]) -> None:
        """Nobody in the batch can be speculated on: plain steps until somebody may."""
        if not all(counts):
            return  # a prompt that is still read grows by a chunk a step, not by a token
        # Contexts grow by a token a step; a batch that changes is looked at anyway.
        missing = min(self.config.min_context - n for n in computed)
        self._built.speculator.controller.backoff.begin(missing if missing > 0 else _REST)

    def synchronize_times(self, synchronize: bool) -> None:
        """Nothing: this runner's loop reads every result on the host."""

    def _forget_finished(self) -> None:
        """Releases what is kept for requests that have left, or whose name has a new owner."""
        alive = self._runner.requests
        for request_id, request in list(self._requests.items()):
            if alive.get(request_id) is not request:
                self._built.speculator.release(request_id)
                self._boundary.forget(request_id)
                del self._requests[request_id]

    def _count_full_pass(self, counts: list[int]) -> None:
        observe = self._built.speculator.controller.observe_full_pass
        request_ids = self._runner.input_batch.req_ids
        for request_id, drafted, count in zip(request_ids, self._num_scheduled_drafts, counts):
            if drafted and count:
                observe(request_id, drafted, count - 1)
                self.counters.add_full_pass(drafted, count - 1)
