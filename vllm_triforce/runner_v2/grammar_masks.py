"""Grammar masks on the device, bounded by the drafts of a step.

vLLM allocates ``num_speculative_tokens + 1`` masks for each of ``max_num_seqs`` requests: 0.2 GiB
for 1,024 requests, 12 drafts and a vocabulary of 128,256. At most ``max_speculating_seqs`` requests
have drafts.
"""

from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.vllm_patches import swaps


class BoundedGrammarMasks(StructuredOutputsWorker):
    """vLLM's worker with fewer masks."""

    def bound(self, num_rows: int) -> None:
        """Free masks past ``num_rows``."""
        if num_rows < len(self.grammar_bitmask):
            self.grammar_bitmask = self.grammar_bitmask[:num_rows].clone()

    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        num_rows, width = grammar_bitmask.shape
        if num_rows > len(self.grammar_bitmask):  # sent by a scheduler other than TriForce's
            self.grammar_bitmask = self.grammar_bitmask.new_zeros(num_rows, width)
        super().apply_grammar_bitmask(logits, input_batch, grammar_req_ids, grammar_bitmask)


def bound_grammar_masks(runner, config: ResolvedConfig) -> None:
    """Replace the runner's masks, once its model is loaded."""
    masks = BoundedGrammarMasks.__new__(BoundedGrammarMasks)
    masks.__dict__ = swaps.STRUCTURED_OUTPUTS.set(runner, masks).__dict__
    num_drafts = config.max_speculating_seqs * runner.num_speculative_steps
    masks.bound(runner.max_num_reqs + num_drafts)
