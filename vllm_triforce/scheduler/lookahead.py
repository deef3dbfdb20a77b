"""Blocks for drafts: given to requests that somebody plans for, taken back before anybody waits.

Once speculation is configured, vLLM's scheduler reserves ``num_speculative_tokens`` slots for every
request, and preempts others for them. Here a step is scheduled as without speculation. What is
free then is lent to the requests that propose behind the step, as far as they propose, and what is
lent is taken back, drafts included, once the next step's plain tokens need it. The worker forgets
blocks that were taken back (``blocks_kept()``).
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

# Attribute of vLLM's SchedulerOutput, which goes to the workers as it is.
_ATTRIBUTE = "triforce_blocks_kept"


def blocks_kept(scheduler_output) -> Mapping[str, tuple[int, ...]]:
    """Blocks that requests keep at the begin of a step, by KV cache group, of those that lost
    some."""
    return getattr(scheduler_output, _ATTRIBUTE, {})


class LendsBlocks:
    """Over a scheduler of vLLM's: drafts never cost another request its place."""

    # The scheduler's own.
    vllm_config: Any
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    connector: Any
    kv_cache_manager: Any
    num_spec_tokens: int
    max_num_running_reqs: int
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
        """Running requests that may have blocks beyond those of their computed tokens."""

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
        borrowers = [its for its in self.running if its.request_id in self._borrowers]
        self._borrowers = {its.request_id for its in drafting + borrowers}
        self.num_lookahead_tokens = 0
        if not self._borrowers:
            return {}
        kept: dict[str, tuple[int, ...]] = {}
        num_lent = sum(self._num_lent(request) for request in borrowers)
        needed = self._num_needed(self._num_free + num_lent)
        if self.connector is not None:
            self._look_ahead_beside_connector(needed)
        elif needed > self._num_free:
            kept = {its.request_id: self._take_back(its) for its in borrowers}
        spare_blocks = self._num_free - needed
        spare_tokens = self.max_num_scheduled_tokens - len(self.running)
        for request in drafting:
            end, count = self._plain_end(request), len(request.spec_token_ids)
            count = max(0, min(count, spare_tokens))
            missing = self._num_missing(request, end)
            more = self._num_missing(request, min(end + count, self.max_model_len)) - missing
            if more > max(0, spare_blocks):
                count, more = self._slots_behind(request, end, count), 0
            spare_blocks, spare_tokens = spare_blocks - more, spare_tokens - count
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
                lent[name] = self._slots_behind(request, computed + 1, count)
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
            max(0, -(-end // manager.block_size) - len(manager.req_to_blocks[name]))
            for manager in self._managers
        )

    def _num_lent(self, request) -> int:
        """Blocks of a request beyond those of its computed tokens."""
        computed, name = request.num_computed_tokens, request.request_id
        return sum(
            max(0, len(manager.req_to_blocks[name]) + -computed // manager.block_size)
            for manager in self._managers
        )

    def _slots_behind(self, request, end: int, most: int) -> int:
        """Of ``most`` tokens behind the first ``end``, those that need no further block than
        these."""
        name = request.request_id
        slots = min(
            max(len(manager.req_to_blocks[name]), -(-end // manager.block_size))
            * manager.block_size
            for manager in self._managers
        )
        return max(0, min(most, slots - end))

    def _num_needed(self, num_available: int) -> int:
        """Blocks for the next steps' plain tokens, and for the requests that are admitted then.

        Args:
            num_available: blocks; who needs more of them than are left waits on.
        """
        needed = sum(self._num_missing(its, self._plain_end(its)) for its in self.running)
        num_places = max(0, self.max_num_running_reqs - len(self.running))
        for request in islice(self.waiting, num_places):
            end = min(request.num_tokens + self._num_steps_ahead, self.max_model_len)
            its = sum(-(-end // manager.block_size) for manager in self._managers)
            its += self.kv_cache_manager.watermark_blocks
            if needed + its > num_available:
                break
            needed += its
        return needed


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
