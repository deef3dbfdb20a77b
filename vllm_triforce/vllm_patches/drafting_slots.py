"""The token budget of a step is stock vLLM's.

For every request of a step vLLM's scheduler leaves a token of ``max_num_batched_tokens`` free if
the method is ``draft_model``, whose drafter reads the step's tokens and one more. TriForce's
levels have inputs of their own. With the token gone, a prompt that just fits into a step would
need another one, and its first token would come that much later.
"""

from vllm_triforce.config.tag import is_triforce
from vllm_triforce.vllm_patches.patch import Patch


def _none_for_triforce(original):
    def max_num_new_slots_for_drafting(self) -> int:
        return 0 if is_triforce(self) else original(self)

    return max_num_new_slots_for_drafting


PATCHES = [
    Patch(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "max_num_new_slots_for_drafting",
        _none_for_triforce,
        ("self",),
        why="for `draft_model` the scheduler keeps a token of a step's budget free per request, "
        "which TriForce does not use: a prompt that just fits would be read in two steps",
        until="vLLM has a registry of out-of-tree speculative methods",
    )
]
