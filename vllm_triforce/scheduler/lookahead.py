"""Room for drafts: KV blocks and a share of the token budget that plain tokens leave.

With speculation configured, stock vLLM reserves ``num_speculative_tokens`` slots for every request
and preempts others for them. Here a step is scheduled as without speculation. Afterwards, requests
that propose borrow free blocks for the tokens that they may propose. Before the next step, blocks
and drafts are taken back if plain tokens need the room. Workers drop these blocks too
(``core/messages.py``).

Plain tokens are a token of each request that decodes, and all that prompts can use of the step:
those that are read, and those that vLLM would admit without drafts. Drafts of seeded requests come
before prompts, as their samples must not depend on arrivals.

Blocks of recurrent states are never lent: after a step the accepted state is in one that a draft's
token had.

``PrefixCacheMixin`` puts blocks filled by accepted tokens into the prefix cache in the same step.
Stock vLLM caches a block when the step that fills it is scheduled, without tokens that may still be
rejected. After a request's last step, or a preemption, those tokens would never be cached, and the
next turn would compute them again. ``AsyncScheduler`` already handles this.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import RequestStatus

from vllm_triforce.core.limits import sampling_seed
from vllm_triforce.core.messages import BLOCKS_KEPT
from vllm_triforce.scheduler import SchedulerBase


def has_seed(request) -> bool:
    """True if a request samples with a seed."""
    return sampling_seed(request.sampling_params) is not None


class Needs(NamedTuple):
    """Blocks and tokens of the next step, drafts excluded."""

    num_blocks: int
    num_tokens: int


class _Hit(NamedTuple):
    """Blocks and tokens of a waiting request that the prefix cache has."""

    blocks: tuple
    num_tokens: int


class LookaheadMixin(SchedulerBase):
    """Mixin for vLLM's schedulers: drafts never take room that plain tokens need."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_lookahead_tokens = 0
        self._spec_decode_step_blocks = 0
        if self.dynamic_sd_lookup is None:
            # With a schedule of draft lengths by batch size, vLLM adds no placeholder drafts. These
            # might exceed a step's token budget, and their request would wait forever.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        # Drafts in flight count as accepted until their step's output arrives.
        self._num_steps_ahead = self.vllm_config.max_concurrent_batches
        self._borrowers: set[str] = set()
        """Ids of requests that may hold blocks beyond their computed tokens."""
        self._hits: dict[str, _Hit] = {}
        """The newest lookup in the prefix cache for each waiting request, by request id."""

    def schedule(self, *args, **kwargs):
        kept = self._make_room()
        output = super().schedule(*args, **kwargs)
        if kept:
            BLOCKS_KEPT.attach(output, kept)
        return output

    def _request_remaining_blocks(self, request) -> int:
        """Count blocks without slots for drafts, which may lie beyond ``max_model_len``."""
        num_spec_tokens, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            return super()._request_remaining_blocks(request)
        finally:
            self.num_spec_tokens = num_spec_tokens

    def _get_local_prefix_cache_hit(self, request, *args, **kwargs):
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        self._hits[request.request_id] = _Hit(hit[0].blocks, hit[1])
        return hit

    # Before a step.

    def _make_room(self) -> dict[str, tuple[int, ...]]:
        """Cut drafts and take back blocks that plain tokens of the next step need.

        Returns:
            The number of blocks kept by each request that gave some back, by KV cache group.
        """
        if self._hits:
            waiting = self.requests.keys() - {request.request_id for request in self.running}
            self._hits = {i: hit for i, hit in self._hits.items() if i in waiting}
        for request in self.kv_holding_waiting:
            # A session's drafts, which came when its turn had ended.
            request.spec_token_ids = []
        drafting = [request for request in self.running if request.spec_token_ids]
        drafting.sort(key=has_seed, reverse=True)
        # A session waiting for its next input keeps its blocks.
        borrowers = [
            request
            for request in chain(self.running, self.kv_holding_waiting)
            if request.request_id in self._borrowers
            # Tokens in flight may be rejected.
            and self._num_lent(request, request.num_computed_tokens - request.num_in_flight_tokens)
        ]
        self._borrowers = {request.request_id for request in drafting + borrowers}
        self.num_lookahead_tokens = 0
        if not self._borrowers:
            return {}
        kept: dict[str, tuple[int, ...]] = {}
        num_lent = sum(self._num_lent(r, r.num_computed_tokens) for r in borrowers)
        needs = self._needs(self._num_free + num_lent)
        if self.connector is not None:
            self._look_ahead_beside_connector(needs.num_blocks)
        elif num_lent and needs.num_blocks > self._num_free:
            kept = {request.request_id: self._take_back(request) for request in borrowers}
            # Plain tokens had slots in the blocks that were taken back.
            needs = self._needs(self._num_free)
        spare_blocks = self._num_free - needs.num_blocks
        num_taken = 0
        for request in drafting:
            end = self._plain_end(request)
            spare_tokens = self._num_spare(request, needs) - num_taken
            max_drafts = min(len(request.spec_token_ids), spare_tokens)
            count = self._num_fitting(request, end, max_drafts, spare_blocks)
            spare_blocks -= self._num_more(request, end, count)
            num_taken += count
            request.spec_token_ids = request.spec_token_ids[:count]
        return kept

    def _look_ahead_beside_connector(self, needed: int) -> None:
        """Let vLLM reserve lookahead slots if every request can have them.

        A KV connector cannot be notified that blocks were taken back, so none are lent.
        """
        num_requests = len(self.running) + len(self.waiting)
        num_blocks = sum(-(-self.num_spec_tokens // m.block_size) for m in self._managers)
        if self._num_free - needed >= num_requests * num_blocks:
            self.num_lookahead_tokens = self.num_spec_tokens

    def _take_back(self, request) -> tuple[int, ...]:
        """Free blocks beyond the computed tokens; return the number kept by KV cache group."""
        kept = []
        for manager in self._managers:
            blocks = manager.req_to_blocks[request.request_id]
            count = len(blocks)
            if not isinstance(manager, MambaManager):
                count = min(count, -(-request.num_computed_tokens // manager.block_size))
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks[count:]))
            del blocks[count:]
            kept.append(count)
        return tuple(kept)

    # After a step.

    def _lend(self, scheduler_output, wanted: Mapping[str, int], needs: Needs) -> dict[str, int]:
        """Lend free blocks for drafts to requests of the step that was just scheduled.

        Returns:
            Of the tokens ``wanted``, those that fit, by request id.
        """
        self._borrowers.update(wanted)
        lent = {}
        for request_id, count in wanted.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            # The full pass that verifies drafts computes one more token.
            end = min(computed + 1 + count, self._limit(request))
            lent[request_id] = count
            if not self._num_missing(request, end):
                continue
            blocks = None
            if self.connector is None:
                blocks = self.kv_cache_manager.allocate_slots(
                    request, end - computed, reserved_blocks=needs.num_blocks
                )
            if blocks is None:
                lent[request_id] = self._num_fitting(request, computed + 1, count, 0)
            else:
                _announce(scheduler_output, request_id, blocks.get_block_ids())
        return lent

    def _next_needs(self) -> Needs:
        """Count blocks and tokens that the step after the one just scheduled needs.

        A step that gives a first token is not to wait for drafts that could be left out in time, so
        it needs all tokens.
        """
        needs, max_chunk = self._needs(self._num_free, is_ahead=True), self._max_chunk()
        if any(r.is_prefill_chunk and self._num_plain(r) <= max_chunk for r in self.running):
            return needs._replace(num_tokens=self.max_num_scheduled_tokens)
        return needs

    def _share_tokens(self, wanted: Mapping[str, int], needs: Needs) -> dict[str, int]:
        """Shorten planned proposals, by request id, to the next step's spare tokens."""
        requests = {request_id: self.requests[request_id] for request_id in wanted}
        # Proposals shorter than an equal share leave the rest to longer ones. Seeded requests
        # do not share: their samples must not depend on the number of proposals.
        order = sorted(
            wanted, key=lambda request_id: (not has_seed(requests[request_id]), wanted[request_id])
        )
        shares: dict[str, int] = {}
        for request_id in order:
            num_spare = self._num_spare(requests[request_id], needs) - sum(shares.values())
            num_sharing = 1 if has_seed(requests[request_id]) else len(wanted) - len(shares)
            share = -(-max(0, num_spare) // num_sharing)
            shares[request_id] = min(wanted[request_id], share)
        return shares

    # Counting.

    @property
    def _managers(self):
        return self.kv_cache_manager.coordinator.single_type_managers

    @property
    def _num_free(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _limit(self, request) -> int:
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _plain_end(self, request) -> int:
        """Return the length up to which a request's next steps compute, drafts excluded."""
        num_tokens = request.num_tokens + request.num_output_placeholders
        end = max(num_tokens, request.num_computed_tokens + 1)
        return min(end + self._num_steps_ahead - 1, max(num_tokens, self._limit(request)))

    def _num_missing(self, request, end: int) -> int:
        """Count blocks that a request still lacks for its first ``end`` tokens."""
        request_id = request.request_id
        return sum(
            max(
                0,
                -(-end // manager.block_size)
                + _num_states(manager)
                - len(manager.req_to_blocks.get(request_id, ())),
            )
            for manager in self._managers
        )

    def _num_lent(self, request, computed: int) -> int:
        """Count blocks of a request beyond its first ``computed`` tokens."""
        request_id = request.request_id
        return sum(
            max(0, len(manager.req_to_blocks.get(request_id, ())) + -computed // manager.block_size)
            for manager in self._managers
            if not isinstance(manager, MambaManager)
        )

    def _num_more(self, request, end: int, count: int) -> int:
        """Count additional blocks for ``count`` tokens after the first ``end``."""
        draft_end = max(end, min(end + count, self.max_model_len))
        return self._num_missing(request, draft_end) - self._num_missing(request, end)

    def _num_fitting(self, request, end: int, max_tokens: int, num_spare: int) -> int:
        """Count tokens after the first ``end`` that fit into ``num_spare`` blocks.

        The result is at most ``max_tokens``. A longer draft is never cut below a shorter one. A
        draft's length depends on its tokens, so a cut by length would make the verification of a
        token depend on later tokens.
        """
        num_spare = max(0, num_spare)
        if max_tokens <= 0 or self._num_more(request, end, max_tokens) <= num_spare:
            return max(0, max_tokens)
        num_more = partial(self._num_more, request, end)
        return bisect_right(range(1, max_tokens), num_spare, key=num_more)

    def _needs(self, num_available: int, is_ahead: bool = False) -> Needs:
        """Count blocks and tokens of the next step's plain tokens and newly admitted requests.

        Args:
            num_available: free blocks; requests that need more than remain are not admitted.
            is_ahead: True if a step was just scheduled. Requests that still wait after that are
                taken not to fit by their cached blocks, which take long to count.
        """
        running, max_chunk = self.running, self._max_chunk()
        num_blocks = sum(self._num_missing(r, self._plain_end(r)) for r in running)
        num_tokens = sum(min(self._num_plain(r), max_chunk) for r in running)
        watermark = self.kv_cache_manager.watermark_blocks
        num_places = self.max_num_active_reqs - self.num_waiting_for_streaming_input - len(running)
        for request in islice(self._admissible(), max(0, num_places)):
            num_left = self.max_num_scheduled_tokens - num_tokens
            if num_left <= 0:
                break
            hit = self._hit(request)
            end = min(request.num_tokens + self._num_steps_ahead, self.max_model_len)
            more = self._num_missing(request, end) + watermark
            if num_blocks + more > num_available and not is_ahead:
                more = self._num_to_admit(request, end, hit) + watermark
            if num_blocks + more > num_available:
                if not request.num_computed_tokens and request.request_id not in self._hits:
                    num_tokens += 1  # vLLM looks a request up only where a token is left
                break
            count = min(max(1, request.num_tokens - hit.num_tokens), max_chunk)
            if count > num_left and not self.scheduler_config.enable_chunked_prefill:
                break
            num_blocks += more
            num_tokens += min(count, num_left)
        return Needs(num_blocks, num_tokens)

    def _num_spare(self, request, needs: Needs) -> int:
        """Count tokens of the next step that drafts of such a request may take."""
        num_plain = len(self.running) if has_seed(request) else needs.num_tokens
        return self.max_num_scheduled_tokens - num_plain

    def _num_plain(self, request) -> int:
        """Count tokens that a running request still has to compute, drafts excluded."""
        num_tokens = request.num_tokens + request.num_output_placeholders
        return max(1, num_tokens - request.num_computed_tokens)

    def _max_chunk(self) -> int:
        """Return how many tokens of a prompt a step reads at most."""
        config, num_requests = self.scheduler_config, sum(self.get_request_counts())
        threshold = config.long_prefill_token_threshold
        if threshold <= 0 or num_requests <= 1:
            return self.max_num_scheduled_tokens
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
        return threshold

    def _admissible(self) -> Iterator:
        """Yield waiting requests that nothing but room keeps from being admitted, in order."""
        adapters = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        max_adapters = self.lora_config.max_loras if self.lora_config else 0
        is_paused = self._pause_state != PauseState.UNPAUSED
        for request in chain(self.kv_holding_waiting, () if is_paused else self.waiting):
            if not self._is_ready(request):
                continue
            if self.lora_config and request.lora_request:
                wanted = adapters | {request.lora_request.lora_int_id}
                if len(wanted) > max_adapters:
                    continue
                adapters = wanted
            yield request

    def _is_ready(self, request) -> bool:
        """True if a waiting request waits for neither input, grammar nor connector."""
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return request.structured_output_request.is_grammar_ready
        if self.connector is not None and request in self.deferred_waiting:
            return False  # the connector may still look for its tokens
        return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _hit(self, request) -> _Hit:
        """Return a waiting request's newest lookup in the prefix cache.

        vLLM looks a request up in each step in which it could be admitted. Before the first one
        nothing is taken to be cached: drafts get less of that step.
        """
        hit = self._hits.get(request.request_id)
        if request.num_computed_tokens or hit is None:
            empty = self.kv_cache_manager.empty_kv_cache_blocks.blocks
            return _Hit(empty, request.num_computed_tokens)
        return hit

    def _num_to_admit(self, request, end: int, hit: _Hit) -> int:
        """Count free blocks that vLLM takes to admit a request, cached blocks excluded."""
        return self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=end,
            new_computed_blocks=hit.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=hit.num_tokens,
            num_local_computed_tokens=hit.num_tokens,
            num_tokens_main_model=end,
            apply_admission_cap=True,
        )


def _num_states(manager) -> int:
    """Return the blocks that a request has of a KV cache group for the states of its drafts."""
    return manager.num_speculative_blocks if isinstance(manager, MambaManager) else 0


def _announce(scheduler_output, request_id: str, block_ids: tuple[list[int], ...]) -> None:
    """Add blocks of a request to the new blocks that the step sends to the worker."""
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id == request_id:
            for ids, more in zip(new.block_ids, block_ids):
                ids.extend(more)
            return
    cached = scheduler_output.scheduled_cached_reqs
    index = cached.req_ids.index(request_id)
    before = cached.new_block_ids[index]
    if before is not None:
        block_ids = tuple(ids + more for ids, more in zip(before, block_ids))
    cached.new_block_ids[index] = block_ids


class PrefixCacheMixin(SchedulerBase):
    """Mixin for ``Scheduler``: caches the blocks that a step's accepted tokens filled."""

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids, is_stale
        )
        # vLLM cached the block of a single token when it scheduled the step. After a stop, tokens
        # were computed that are not part of the request.
        if len(new_token_ids) > 1 and not is_stale:
            self.kv_cache_manager.cache_blocks(
                request, min(request.num_computed_tokens, request.num_tokens - 1)
            )
        return new_token_ids, stopped
