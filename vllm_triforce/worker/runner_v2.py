"""Model Runner V2: fills a ``DraftBatch`` and hands the proposal back.

The runner (vllm/v1/worker/gpu/model_runner.py) calls ``propose`` after the outcome of a full pass
is in its request states, writes what it returns to ``req_states.draft_tokens``, reads
``draft_logits`` in the next rejection test, and lets its ``draft_tokens_handler`` report to the
scheduler.
"""

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_triforce.config import TriForceConfig
from vllm_triforce.metrics.report import IntervalReport
from vllm_triforce.speculator.draft_batch import DraftBatch, SamplingRows
from vllm_triforce.worker.build import BuiltSpeculator, attention_layers
from vllm_triforce.worker.proposal_v2 import ProposalStore, ProposedTokensHandler

logger = init_logger("vllm.triforce")


class TriForceSpeculatorV2(StandaloneARSpeculator):
    """TriForce in the place of vLLM's draft model.

    Of vLLM's class it keeps how a draft model is loaded and the buffers that the runner reads.

    Host syncs of one ``propose()``: one for the outcome of the full pass; where a request is
    speculated on, one per KV cache group (block tables) and one per request (token ids); and
    those of the levels, which decide on the host what to feed next.
    """

    num_extra_query_per_req = 0

    def __init__(self, vllm_config, device, runner, config: TriForceConfig, draft_model) -> None:
        super().__init__(vllm_config, device)
        self.config = config
        self.model: torch.nn.Module | None = None
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list = []
        self._runner = runner
        self._draft_model = draft_model
        self._built: BuiltSpeculator | None = None
        self._known_requests: set[str] = set()
        self._store = ProposalStore(self.draft_tokens, self.draft_logits)
        self._handler = runner.draft_tokens_handler = ProposedTokensHandler(device)
        self._report = IntervalReport(config.log_interval)

    # Start-up, in the order of the calls.

    def draft_logits_spec(self, vllm_config) -> tuple[torch.dtype, float]:
        """float32: in bfloat16 they would no longer be what the tokens were drawn from."""
        return torch.float32, float("-inf")

    def load_model(self, target_model) -> None:
        self._target = target_model
        self._target_layers = attention_layers(self.vllm_config)
        if self._draft_model is not None:
            super().load_model(target_model)

    @property
    def draft_layer_names(self) -> set[str]:
        return self.draft_attn_layer_names

    def set_attn(self, *args, **kwargs) -> None:
        """Nothing: the draft's layers are in none of vLLM's KV cache groups."""

    def allocate(self, kv_cache_config) -> None:
        """Builds the levels, once the target's KV cache exists."""
        layers = attention_layers(self.vllm_config)
        draft_layers = {name: layers[name] for name in layers if name in self.draft_layer_names}
        self._built = BuiltSpeculator(
            vllm_config=self.vllm_config,
            config=self.config,
            target=self._target,
            target_layers=self._target_layers,
            draft=self.model,
            draft_layers=draft_layers,
            kv_cache_config=kv_cache_config,
            attn_groups=self._runner.attn_groups,
            block_sizes=self._runner.block_tables.block_sizes,
            device=self.device,
        )

    @property
    def counters(self):
        return self._built.counters

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
        last_sampled,
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
        if dummy_run:
            if skip_attn_for_dummy_run and self.model is not None:
                from vllm_triforce.speculator.streaming import warm_up

                warm_up(self.model, self.vllm_config, self.device)
            return self.draft_tokens[:num_reqs]

        num_computed = self._runner.req_states.num_computed_tokens.gpu[input_batch.idx_mapping]
        outcome = [t[:num_reqs] for t in (num_sampled, num_rejected, num_computed)]
        sampled, rejected, computed = torch.stack(outcome).tolist()
        slots = input_batch.idx_mapping_np[:num_reqs]
        self._forget_finished(input_batch)
        self._count_full_pass(input_batch, slots, sampled)

        most = self.num_speculative_steps
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        room = [
            self._room(slot, n, most) if count else 0
            for slot, n, count in zip(slots, computed, sampled)
        ]
        rows = [row for row, tokens in enumerate(room) if tokens > 0]
        temperatures = self._runner.sampler.sampling_states.temperature.np[slots]
        token_ids: list[list[int]] = [[] for _ in range(num_reqs)]
        probs: list[list[torch.Tensor]] = [[] for _ in range(num_reqs)]
        if rows:
            batch = self._draft_batch(input_batch, rows, slots, computed, room, rejected)
            self._built.recorder.paused = True
            try:
                proposal = self._built.speculator.propose(batch)
            finally:
                self._built.recorder.paused = False
            self._known_requests.update(batch.request_ids)
            for i, row in enumerate(rows):
                token_ids[row] = proposal.token_ids[i]
                if proposal.probs is not None and temperatures[row] > 0:
                    probs[row] = proposal.probs[i]
        self._report.log_if_due(self.counters, logger)
        self._handler.proposed = token_ids
        return self._store.store(slots, token_ids, probs, temperatures)

    def _draft_batch(self, input_batch, rows, slots, computed, room, rejected) -> DraftBatch:
        chosen = slots[rows]
        all_token_ids = self._runner.req_states.all_token_ids.gpu
        tables = self._runner.block_tables
        on_host = [table.gpu[chosen].cpu().numpy() for table in tables.block_tables]
        return DraftBatch(
            request_ids=[input_batch.req_ids[row] for row in rows],
            token_ids=[
                all_token_ids[slot, : computed[row] + 1].cpu().numpy()
                for slot, row in zip(chosen, rows)
            ],
            num_computed_tokens=[computed[row] for row in rows],
            max_num_tokens=[room[row] for row in rows],
            block_tables=[
                [table[i, : tables.num_blocks.np[group, slot]] for i, slot in enumerate(chosen)]
                for group, table in enumerate(on_host)
            ],
            queries=[self._built.recorder.last_accepted(row, rejected[row]) for row in rows],
            sampling=self._sampling(chosen),
        )

    def _room(self, slot: int, num_computed: int, most: int) -> int:
        """Tokens worth proposing for a request: by its context, its blocks and what it may emit."""
        if num_computed < self.config.min_context:
            return 0
        tables = self._runner.block_tables
        reserved = min(tables.num_blocks.np[:, slot] * np.array(tables.block_sizes))
        # The scheduler keeps inputs below max_model_len - 1 (v1/core/sched/scheduler.py); the
        # full pass adds a token of its own.
        length = min(self._runner.max_model_len, int(self._runner.req_states.max_seq_len[slot]))
        return min(most, int(reserved) - num_computed, length - 2 - num_computed)

    def _sampling(self, slots: np.ndarray) -> SamplingRows:
        states = self._runner.sampler.sampling_states

        def on_device(values: np.ndarray, unused) -> torch.Tensor | None:
            values = values[slots]
            return None if (values == unused).all() else torch.from_numpy(values).to(self.device)

        return SamplingRows(
            temperature=torch.from_numpy(states.temperature.np[slots]).to(self.device),
            top_k=on_device(states.top_k.np, states.vocab_size),
            top_p=on_device(states.top_p.np, 1.0),
            min_p=on_device(states.min_p.np, 0.0),
            seeds=[
                int(states.seeds.np[slot]) if states.seeds_set[slot] else None for slot in slots
            ],
        )

    def _forget_finished(self, input_batch) -> None:
        """Releases what is kept for requests that have left, or whose name has a new owner.

        A preempted request leaves the runner too; who prefills has just come, or come back.
        """
        prefilling = (
            name for name, new in zip(input_batch.req_ids, input_batch.is_prefilling_np) if new
        )
        gone = self._known_requests - self._runner.req_states.req_id_to_index.keys()
        gone.update(self._known_requests.intersection(prefilling))
        for request_id in sorted(gone):
            self._built.speculator.release(request_id)
        self._known_requests -= gone

    def _count_full_pass(self, input_batch, slots, sampled: list[int]) -> None:
        scheduled = input_batch.num_draft_tokens_per_req
        if scheduled is None:
            return
        # A prefill may be padded with placeholders, and a proposal with PAD_TOKEN: neither counts.
        for row, slot in enumerate(slots):
            drafted = min(int(scheduled[row]), int(self._store.num_proposed[slot]))
            if drafted and sampled[row] and not input_batch.is_prefilling_np[row]:
                self.counters.add_full_pass(drafted, min(sampled[row] - 1, drafted))
