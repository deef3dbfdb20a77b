"""A session whose input arrives in pieces goes on from KV of its own tokens.

A turn may end inside a run of accepted tokens. vLLM's scheduler then goes on behind the run
(``_handle_stopped_request`` in vllm/v1/core/sched/scheduler.py): it takes the KV of tokens that it
threw away for that of the next piece, and keeps the turn's last token, which it discards elsewhere.
"""

from vllm_triforce.config.tag import is_triforce
from vllm_triforce.vllm_patches.patch import Patch


def _from_its_own_tokens(original):
    def _handle_stopped_request(self, request) -> bool:
        if request.resumable and is_triforce(self.vllm_config.speculative_config):
            # Without speculation all tokens but the last are computed, beside those in flight.
            own = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, own)
        return original(self, request)

    return _handle_stopped_request


PATCHES = [
    Patch(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "_handle_stopped_request",
        _from_its_own_tokens,
        ("self", "request"),
        why="where a turn of a session ends inside a run of accepted tokens, the next one went on "
        "from the KV of tokens behind its end; see below",
        until="vLLM sets the count back to the tokens that are kept",
    )
]
