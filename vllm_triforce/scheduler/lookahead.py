"""Blocks for drafts: given to requests that somebody plans for, taken back before anybody waits.

Once speculation is configured, vLLM's scheduler reserves ``num_speculative_tokens`` slots for every
request, and preempts others for them. Here a step is scheduled as without speculation. What is
free then is lent to the requests that propose behind the step, as far as they propose, and what is
lent is taken back, drafts included, once the next step's plain tokens need it. The worker forgets
blocks that were taken back (``blocks_kept()``).

Blocks that accepted tokens fill are found in the prefix cache at once.

vLLM's scheduler adds a block to the prefix cache when the step that fills it is scheduled, and
leaves tokens out that are still to be accepted. Those of a request's last step would be left out
for ever: where it ends, or is preempted, the next turn, or itself, computes them again.
``AsyncScheduler`` does this by itself.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from itertools import chain, islice
from typing import Any

from vllm.v1.request import RequestStatus

# Attribute of vLLM's SchedulerOutput, which goes to the workers as it is.
_ATTRIBUTE = "triforce_blocks_kept"


def blocks_kept(scheduler_output) -> Mapping[str, tuple[int, ...]]:
    """Blocks that requests keep at the begin of a step, by KV cache group, of those that lost
    some."""
    return getattr(scheduler_output, _ATTRIBUTE, {})


class LookaheadMixin:
    """Over a scheduler of vLLM's: drafts never cost another request its place."""

    # The scheduler's own.
    vllm_config: Any
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    num_waiting_for_streaming_input: int
    connector: Any
    kv_cache_manager: Any
    num_spec_tokens: int
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    max_model_len: int
    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_lookahead_tokens = 0
        self._spec_decode_step_blocks = 0
        if self.dynamic_sd_lookup is None:
            # By size of the batch, how much is proposed at most: with such a schedule vLLM invents
            # no drafts (placeholders.py), which take room, and may not fit into a step's budget:
            # their request would wait for ever.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        # A draft in flight counts as accepted until its step's output has come.
        self._num_steps_ahead = self.vllm_config.max_concurrent_batches
        self._borrowers: set[str] = set()
        """Requests that may have blocks beyond those of their computed tokens."""

    def schedule(self, *args, **kwargs):
        kept = self._make_room()
        output = super().schedule(*args, **kwargs)
        if kept:
            setattr(output, _ATTRIBUTE, kept)
        return output

    def _request_remaining_blocks(self, request) -> int:
        """Without vLLM's room for drafts, which may lie beyond ``max_model_len``."""
        num_spec_tokens, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            return super()._request_remaining_blocks(request)  # type: ignore[misc]
        finally:
            self.num_spec_tokens = num_spec_tokens

    # Before a step.

    def _make_room(self) -> dict[str, tuple[int, ...]]:
        """Cuts drafts, and takes back blocks, that would keep plain tokens out of the step."""
        drafting = [request for request in self.running if request.spec_token_ids]
        # A session that waits for its next piece keeps its blocks.
        borrowers = [
            its
            for its in chain(self.running, self.kv_holding_waiting)
            if its.request_id in self._borrowers
            # What is in flight may be rejected.
            and self._num_lent(its, its.num_computed_tokens - its.num_in_flight_tokens)
        ]
        self._borrowers = {its.request_id for its in drafting + borrowers}
        self.num_lookahead_tokens = 0
        if not self._borrowers:
            return {}
        kept: dict[str, tuple[int, ...]] = {}
        num_lent = sum(self._num_lent(its, its.num_computed_tokens) for its in borrowers)
        needed = self._num_needed(self._num_free + num_lent)
        if self.connector is not None:
            self._look_ahead_beside_connector(needed)
        elif num_lent and needed > self._num_free:
            kept = {its.request_id: self._take_back(its) for its in borrowers}
            # Plain tokens had places in what was taken back.
            needed = self._num_needed(self._num_free)
        spare_blocks = self._num_free - needed
        spare_tokens = self.max_num_scheduled_tokens - len(self.running)
        for request in drafting:
            end, most = self._plain_end(request), min(len(request.spec_token_ids), spare_tokens)
            count = self._num_fitting(request, end, most, spare_blocks)
            spare_blocks -= self._num_more(request, end, count)
            spare_tokens -= count
            request.spec_token_ids = request.spec_token_ids[:count]
        return kept

    def _look_ahead_beside_connector(self, needed: int) -> None:
        """A KV connector hears of the blocks that vLLM gives, and of none that are taken back: vLLM
        gives everybody room for drafts, where there is plenty."""
        everybody = len(self.running) + len(self.waiting)
        each = sum(-(-self.num_spec_tokens // its.block_size) for its in self._managers)
        if self._num_free - needed >= everybody * each:
            self.num_lookahead_tokens = self.num_spec_tokens

    def _take_back(self, request) -> tuple[int, ...]:
        """Frees a request's blocks beyond those of its computed tokens.

        Returns:
            the number of blocks that it keeps, by KV cache group.
        """
        kept = []
        for manager in self._managers:
            blocks = manager.req_to_blocks[request.request_id]
            count = min(len(blocks), -(-request.num_computed_tokens // manager.block_size))
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks[count:]))
            del blocks[count:]
            kept.append(count)
        return tuple(kept)

    # Behind a step.

    def _lend(self, scheduler_output, wanted: Mapping[str, int]) -> dict[str, int]:
        """Gives requests of a step that was just scheduled room for drafts, of what is free.

        Args:
            wanted: tokens that each may propose, by request.

        Returns:
            Tokens that each has room for.
        """
        self._borrowers.update(wanted)
        lent, needed = {}, None
        for name, count in wanted.items():
            request = self.requests[name]
            computed = request.num_computed_tokens
            # The full pass that verifies drafts computes one token more.
            end = min(computed + 1 + count, self._limit(request))
            lent[name] = count
            if not self._num_missing(request, end):
                continue
            blocks = None
            if self.connector is None:
                needed = self._num_needed(self._num_free) if needed is None else needed
                blocks = self.kv_cache_manager.allocate_slots(
                    request, end - computed, reserved_blocks=needed
                )
            if blocks is None:
                lent[name] = self._num_fitting(request, computed + 1, count, 0)
            else:
                _announce(scheduler_output, name, blocks.get_block_ids())
        return lent

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
        """Tokens up to which a request's next steps compute without further drafts."""
        known = request.num_tokens + request.num_output_placeholders
        end = max(known, request.num_computed_tokens + 1)
        return min(end + self._num_steps_ahead - 1, max(known, self._limit(request)))

    def _num_missing(self, request, end: int) -> int:
        """Blocks that a request still needs for its first ``end`` tokens."""
        name = request.request_id
        return sum(
            max(0, -(-end // manager.block_size) - len(manager.req_to_blocks.get(name, ())))
            for manager in self._managers
        )

    def _num_lent(self, request, computed: int) -> int:
        """Blocks of a request beyond those of its first ``computed`` tokens."""
        name = request.request_id
        return sum(
            max(0, len(manager.req_to_blocks.get(name, ())) + -computed // manager.block_size)
            for manager in self._managers
        )

    def _num_more(self, request, end: int, count: int) -> int:
        """Count further blocks that ``count`` tokens behind the first ``end`` need."""
        behind = max(end, min(end + count, self.max_model_len))
        return self._num_missing(request, behind) - self._num_missing(request, end)

    def _num_fitting(self, request, end: int, most: int, num_spare: int) -> int:
        """Count tokens behind the first ``end``, up to ``most``, that need ``num_spare`` blocks.

        A longer draft is never cut to less than a shorter one keeps: how long it is depends on its
        tokens, and whether a token is verified must not depend on those behind it.
        """
        num_spare = max(0, num_spare)
        if most <= 0 or self._num_more(request, end, most) <= num_spare:
            return max(0, most)
        return bisect_right(range(1, most), num_spare, key=partial(self._num_more, request, end))

    def _num_needed(self, num_available: int) -> int:
        """Blocks for the next steps' plain tokens, and for the requests that are admitted then.

        Args:
            num_available: blocks; who needs more of them than are left waits on.
        """
        needed = sum(self._num_missing(its, self._plain_end(its)) for its in self.running)
        num_active = len(self.running) + self.num_waiting_for_streaming_input
        ready = (
            its
            for its in chain(self.kv_holding_waiting, self.waiting)
            if its.status != RequestStatus.WAITING_FOR_STREAMING_REQ
        )
        for request in islice(ready, max(0, self.max_num_active_reqs - num_active)):
            end = min(request.num_tokens + self._num_steps_ahead, self.max_model_len)
            its, watermark = self._num_missing(request, end), self.kv_cache_manager.watermark_blocks
            if needed + its + watermark > num_available:
                # Much of it may be cached, which takes long to find: for the first one alone.
                its = self._num_to_admit(request, end)
                fits = needed + its + watermark <= num_available
                return needed + (its + watermark) * fits
            needed += its + watermark
        return needed

    def _num_to_admit(self, request, end: int) -> int:
        """Count the free blocks that vLLM takes to admit a request, less what is cached of it."""
        manager, computed = self.kv_cache_manager, request.num_computed_tokens
        blocks = manager.empty_kv_cache_blocks
        if not computed and self.connector is None:
            blocks, computed, _ = manager.get_computed_blocks(request)
        return manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=end,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=end,
            apply_admission_cap=True,
        )


def _announce(scheduler_output, name: str, block_ids: tuple[list[int], ...]) -> None:
    """Adds blocks to those that the worker is told of with the step."""
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id == name:
            for ids, more in zip(new.block_ids, block_ids):
                ids.extend(more)
            return
    cached = scheduler_output.scheduled_cached_reqs
    place = cached.req_ids.index(name)
    before = cached.new_block_ids[place]
    if before is not None:
        block_ids = tuple(ids + more for ids, more in zip(before, block_ids))
    cached.new_block_ids[place] = block_ids


class PrefixCacheMixin:
    """Over ``Scheduler``: adds the blocks that a step's accepted tokens filled."""

    # The scheduler's own.
    kv_cache_manager: Any

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids, is_stale
        )
        # A single token fills nothing that was not known when the step was scheduled. Behind a
        # stop, tokens were computed that the request does not have.
        if len(new_token_ids) > 1 and not is_stale:
            self.kv_cache_manager.cache_blocks(
                request, min(request.num_computed_tokens, request.num_tokens - 1)
            )
        return new_token_ids, stopped
