"""Blocks that accepted tokens fill are found in the prefix cache at once.

vLLM's scheduler adds a block to the prefix cache when the step that fills it is scheduled, and
leaves tokens out that are still to be accepted. Those of a request's last step would be left out
for ever: where it ends, or is preempted, the next turn, or itself, computes them again.
``AsyncScheduler`` does this by itself.
"""

from typing import Any


class CachesAcceptedBlocks:
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
