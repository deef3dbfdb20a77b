"""Rejection sampler of Model Runner V1, with the sampling parameters that vLLM's omits.

Once speculation is configured, vLLM builds no processors for ``min_p`` and ``logit_bias``
(``build_logitsprocs``), and its rejection sampler does not apply them to draft tokens. If any
request of the batch has ``logprob_token_ids``, it returns their log-probabilities for all requests.
"""

from dataclasses import replace

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
)
from vllm.v1.sample.rejection_sampler import RejectionSampler

from vllm_triforce.config import read_config
from vllm_triforce.core.limits import GREEDY_EPSILON
from vllm_triforce.runner_v1.acceptance import AcceptanceRecorder
from vllm_triforce.runner_v1.synthetic import SyntheticTest
from vllm_triforce.runner_v1.thinking_budget import PlainThinkingBudget
from vllm_triforce.vllm_patches import swaps


def support_all_sampling_params(runner, vllm_config, device) -> AcceptanceRecorder:
    """Give a runner every built-in logits processor and a rejection sampler that applies them.

    Returns:
        The recorder of each step's acceptance probabilities.
    """
    batch = runner.input_batch
    processors = LogitsProcessors(
        processor(vllm_config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS
    )
    swaps.LOGITS_PROCESSORS.set(batch, processors)
    swaps.METADATA_PROCESSORS.set(batch.sampling_metadata, processors)
    if vllm_config.reasoning_config is not None:
        budget = PlainThinkingBudget(vllm_config.reasoning_config, batch.max_num_reqs, device)
        swaps.THINKING_BUDGET.set(batch, budget)
        swaps.METADATA_THINKING_BUDGET.set(batch.sampling_metadata, budget)
    sampler = CompleteRejectionSampler(runner.sampler, vllm_config.speculative_config, device)
    if (rates := vllm_config.speculative_config.synthetic_acceptance_rates) is not None:
        config, _ = read_config(vllm_config)
        sampler.acceptance = SyntheticTest(
            rates,
            config.synthetic_level1_acceptance,
            batch,
            vllm_config.model_config.seed,
        )
    swaps.REJECTION_SAMPLER.set(runner, sampler)
    return sampler.acceptance


class CompleteRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with every parameter that vLLM's plain sampler supports."""

    def __init__(self, sampler, spec_config, device) -> None:
        super().__init__(sampler, spec_config, device)
        self.acceptance = AcceptanceRecorder()

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        """Verify the draft tokens, as vLLM does."""
        self.acceptance.clear()
        self._logprob_token_ids = sampling_metadata.logprob_token_ids or {}
        if self._logprob_token_ids:
            # The plain sampler would return only these log-probabilities for the bonus tokens.
            sampling_metadata = replace(
                sampling_metadata,
                logprob_token_ids=None,
                max_num_logprobs=sampling_metadata.max_num_logprobs or 0,
            )
        with self.acceptance:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def apply_logits_processors(self, logits, sampling_metadata, metadata):
        """Process the logits of draft tokens. The plain sampler processes rows without drafts."""
        # Biases come first, as in the plain sampler: a penalty depends on the logit's sign.
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                _add_biases(logits, _owners(metadata), processor.biases)
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                owners = _owners(metadata).to(logits.device)
                min_p = processor.min_p[owners].view(-1)
                _mask_below_min_p(logits, min_p, sampling_metadata.temperature[owners])
        return logits

    def _get_logprobs_tensors(
        self, max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
    ) -> LogprobsTensors:
        tensors = super()._get_logprobs_tensors(
            max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
        )
        if not self._logprob_token_ids:
            return tensors
        if not self.is_logits_logprobs_mode:
            bonus_logits = self.sampler.compute_logprobs(bonus_logits)
        row_length = sampled_token_ids.shape[1]
        return _add_logprobs(tensors, self._logprob_token_ids, bonus_logits, row_length)


def _owners(metadata) -> torch.Tensor:  # [num_draft_tokens]
    """Compute the batch row of each draft token."""
    counts = torch.tensor(metadata.num_draft_tokens)
    return torch.arange(len(counts)).repeat_interleave(counts)


def _add_logprobs(
    tensors: LogprobsTensors,  # [batch_size * row_length, ...]
    token_ids_by_row: dict[int, list[int]],  # by row of the batch; these rows have no drafts
    logprobs: torch.Tensor,  # [batch_size, vocab_size]
    row_length: int,
) -> LogprobsTensors:
    """Set the log-probabilities of rows with ``logprob_token_ids`` to those of these tokens."""
    width = max(tensors.logprobs.shape[1], 1 + max(map(len, token_ids_by_row.values())))
    padding = (0, width - tensors.logprobs.shape[1])
    ids = torch.nn.functional.pad(tensors.logprob_token_ids, padding)
    values = torch.nn.functional.pad(tensors.logprobs, padding, value=float("-inf"))
    for row, token_ids in token_ids_by_row.items():
        index = torch.tensor(token_ids, device=ids.device)
        ids[row * row_length, 1 : 1 + len(token_ids)] = index.to(ids.dtype)
        values[row * row_length, 1 : 1 + len(token_ids)] = logprobs[row, index]
    return LogprobsTensors(ids, values, tensors.selected_token_ranks)


def _add_biases(
    logits: torch.Tensor,  # [num_draft_tokens, vocab_size], changed in place
    owners: torch.Tensor,  # [num_draft_tokens], row of the batch
    biases: dict[int, dict[int, float]],  # by row of the batch, by token
) -> None:
    """Add ``logit_bias``."""
    for place, owner in enumerate(owners.tolist()):
        if bias := biases.get(owner):
            tokens = torch.tensor(list(bias), device=logits.device)
            logits[place, tokens] += torch.tensor(list(bias.values()), device=logits.device)


def _mask_below_min_p(
    logits: torch.Tensor,  # [num_draft_tokens, vocab_size], changed in place
    min_p: torch.Tensor,  # [num_draft_tokens]
    temperature: torch.Tensor,  # [num_draft_tokens]
) -> None:
    """Apply min-p to logits that vLLM has not divided by the temperature yet."""
    temperature = torch.where(temperature < GREEDY_EPSILON, 1.0, temperature)
    probs = (logits / temperature[:, None]).softmax(-1)
    floor = probs.amax(-1, keepdim=True) * min_p[:, None]
    logits.masked_fill_(probs < floor, float("-inf"))
