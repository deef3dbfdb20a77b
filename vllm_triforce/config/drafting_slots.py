"""The token budget of a step is stock vLLM's.

For every request of a step vLLM's scheduler leaves a token of ``max_num_batched_tokens`` free if
the method is ``draft_model``, whose drafter reads the step's tokens and one more. TriForce's
levels have inputs of their own. With the token gone, a prompt that just fits into a step would
need another one, and its first token would come that much later.
"""

from vllm_triforce.config.mark import is_triforce

PROPERTY = "max_num_new_slots_for_drafting"


def install() -> None:
    """Wraps the property that the scheduler asks; it falls through for any other method."""
    from vllm.config.speculative import SpeculativeConfig

    original = SpeculativeConfig.max_num_new_slots_for_drafting.fget

    def max_num_new_slots_for_drafting(self) -> int:
        return 0 if is_triforce(self) else original(self)

    SpeculativeConfig.max_num_new_slots_for_drafting = property(max_num_new_slots_for_drafting)
