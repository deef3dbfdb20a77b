"""Level 3 on Model Runner V2: vLLM's rejection sampler and grammar masks, made for proposals."""

import torch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.kernels.proposals import DraftLogits, level3_test_rows
from vllm_triforce.kernels.synthetic import ACCEPT_ALL
from vllm_triforce.vllm_patches import swaps


def replace_rejection_sampler(runner, draft_logits: DraftLogits) -> None:
    """Replace a runner's rejection sampler, unless the model has one of its own."""
    if type(runner.rejection_sampler) is not RejectionSampler:
        raise RuntimeError(
            f"method='triforce' is not supported with {type(runner.rejection_sampler).__name__}: "
            "it tests drafts in its own way. Use another method"
        )
    sampler = CompleteRejectionSamplerV2.__new__(CompleteRejectionSamplerV2)
    sampler.__dict__ = swaps.REJECTION_SAMPLER_V2.set(runner, sampler).__dict__
    sampler.draft_logits = draft_logits
    if sampler.synthetic_conditional_rates is not None:  # SyntheticTest rejects before
        sampler.synthetic_conditional_rates.fill_(ACCEPT_ALL)
    # Ranks that share sampling gather no log-probabilities of given tokens.
    sampler.supports_logprob_token_ids = runner.batch_sharder is None


class CompleteRejectionSamplerV2(RejectionSampler):
    """vLLM's rejection sampler, with distributions by slot and ``logprob_token_ids``.

    vLLM's reads distributions of ``max_num_seqs`` requests, and returns no ``logprob_token_ids`` if
    a request of the batch has drafts.
    """

    draft_logits: DraftLogits
    supports_logprob_token_ids: bool

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ):
        """Make the two calls of vLLM's method, the second with rows by slot.

        The argument ``draft_logits`` is not read: ``self.draft_logits`` has the distributions.
        """
        num_token_ids = self.sampler.logprob_token_ids_state.max_num_token_ids(idx_mapping_np)
        self._num_token_ids = num_token_ids * self.supports_logprob_token_ids
        self._state_indices = expanded_idx_mapping
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        rows = level3_test_rows(
            self.draft_logits,
            expanded_idx_mapping,
            expanded_local_pos,
            verify_draft_sampled,
            states.temperature.gpu,
            states.seeds.gpu,
        )
        if (synthetic := self.draft_logits.synthetic) is not None:
            synthetic.reject(rows.draft_tokens, rows.owners, expanded_local_pos)
        sampled, num_sampled = rejection_sample(
            processed,
            self.draft_logits.logits,
            rows.draft_tokens,
            cu_num_logits,
            pos,
            rows.owners[cu_num_logits[:-1]],
            rows.owners,
            rows.places,
            rows.temperature,
            rows.seeds,
            self.num_speculative_steps,
            self.synthetic_conditional_rates,
            use_fp64=self.sampler.use_fp64_gumbel,
            use_block_verification=self.use_block_verification,
        )
        return processed, sampled, num_sampled

    def _get_logprobs_tensors(
        self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
    ):
        if not self._num_token_ids:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        # [num_logits]: each request's sampled tokens, then 0 in places that are not read.
        starts = cu_num_logits[:-1].repeat_interleave(cu_num_logits.diff(), output_size=len(logits))
        places = torch.arange(len(logits), device=logits.device) - starts
        requests = torch.arange(len(cu_num_logits) - 1, device=logits.device).repeat_interleave(
            cu_num_logits.diff(), output_size=len(logits)
        )
        tokens = torch.where(places < num_sampled[requests], sampled[requests, places], 0)
        return compute_topk_scores(
            logits,
            0 if max_num_logprobs == NO_LOGPROBS else max_num_logprobs,
            tokens,
            cu_num_logits_np.tolist() if len(logits) != len(cu_num_logits_np) - 1 else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=self._state_indices,
            max_per_req_token_ids=self._num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class BoundedGrammarMasks(StructuredOutputsWorker):
    """vLLM's worker, with masks on the device for the drafts that a step can have.

    vLLM allocates ``num_speculative_tokens + 1`` masks for each of ``max_num_seqs`` requests: 0.2
    GiB for 1,024 requests, 12 drafts and a vocabulary of 128,256. At most ``max_speculating_seqs``
    requests have drafts.
    """

    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        num_rows, width = grammar_bitmask.shape
        if num_rows > len(self.grammar_bitmask):  # sent by a scheduler other than TriForce's
            self.grammar_bitmask = self.grammar_bitmask.new_zeros(num_rows, width)
        super().apply_grammar_bitmask(logits, input_batch, grammar_req_ids, grammar_bitmask)


def bound_grammar_masks(runner, config: ResolvedConfig) -> None:
    """Replace the runner's masks by fewer, once its model is loaded."""
    masks = BoundedGrammarMasks.__new__(BoundedGrammarMasks)
    masks.__dict__ = swaps.STRUCTURED_OUTPUTS.set(runner, masks).__dict__
    num_rows = runner.max_num_reqs + config.max_speculating_seqs * runner.num_speculative_steps
    if num_rows < len(masks.grammar_bitmask):
        masks.grammar_bitmask = masks.grammar_bitmask[:num_rows].clone()
