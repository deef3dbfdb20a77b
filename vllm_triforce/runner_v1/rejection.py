"""Level 3's test: vLLM's rejection sampler with the sampling parameters that vLLM's omits.

Once speculation is configured, vLLM builds no processors for ``min_p`` and ``logit_bias``
(``build_logitsprocs``), and its rejection sampler does not apply them to draft tokens. If any
request of the batch has ``logprob_token_ids``, it returns their log-probabilities for all requests.

The test accepts a draft token x with probability min(1, p(x) / q(x)) (arXiv 2211.17192), which
does not depend on the outcomes before it. The controller learns from these probabilities: one
teaches more than an outcome, and tokens after a rejected one teach as well.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_triforce.config import read_config
from vllm_triforce.config.synthetic import rates_by_place
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.limits import GREEDY_EPSILON
from vllm_triforce.runner_v1.sampling import below_min_p, softmax
from vllm_triforce.vllm_patches import swaps

Routes = Mapping[str, str]
"""Route of each request's last proposal."""


def support_all_sampling_params(
    runner, vllm_config, device, routes: Routes
) -> "CompleteRejectionSampler":
    """Give a runner every built-in logits processor and a rejection sampler that applies them."""
    batch = runner.input_batch
    processors = LogitsProcessors(
        processor(vllm_config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS
    )
    swaps.LOGITS_PROCESSORS.set(batch, processors)
    swaps.METADATA_PROCESSORS.set(batch.sampling_metadata, processors)
    if vllm_config.reasoning_config is not None:
        budget = PlainThinkingBudget(
            vllm_config.reasoning_config, batch.max_num_reqs, 0, device, False
        )
        swaps.THINKING_BUDGET.set(batch, budget)
        swaps.METADATA_THINKING_BUDGET.set(batch.sampling_metadata, budget)
    synthetic = None
    if (rates := vllm_config.speculative_config.synthetic_acceptance_rates) is not None:
        direct_rate = read_config(vllm_config)[0].synthetic_level1_acceptance
        seed = vllm_config.model_config.seed
        synthetic = SyntheticTest(rates, direct_rate, batch, routes, seed)
    sampler = CompleteRejectionSampler(
        runner.sampler, vllm_config.speculative_config, device, synthetic
    )
    swaps.REJECTION_SAMPLER.set(runner, sampler)
    return sampler


class PlainThinkingBudget(ThinkingBudgetStateHolder):
    """vLLM's holder of ``thinking_token_budget`` states without speculation.

    With ``num_spec_tokens`` vLLM has other rules, and forces another request's token in a step
    without drafts. Requests with a budget have no drafts (``core/limits.py``).
    """

    def sync_batch(self, batch_update: BatchUpdate | None) -> None:
        """Update the state's rows to the batch's."""
        for _, row, direction in batch_update.moved if batch_update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                # vLLM would leave a finished request's state to a request without a budget.
                self._state.pop(row, None)
        super().sync_batch(batch_update)

    def apply_to_logits(self, logits, predict_bonus_token, spec_token_ids):
        """Force tokens of a step, whose logits have one row per request."""
        return super().apply_to_logits(logits, False, spec_token_ids)


class CompleteRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with every parameter that vLLM's plain sampler supports."""

    def __init__(
        self, sampler, spec_config, device, synthetic: "SyntheticTest | None" = None
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._test = self._record_and_test if synthetic is None else synthetic
        self._acceptance: tuple[torch.Tensor, list[int]] | None = None
        """Acceptance probability of each draft token of the step, and their number by row."""

    def acceptance_by_row(self) -> list[list[float]] | None:
        """Return the probabilities of each row's draft tokens, None if none were recorded."""
        if self._acceptance is None:
            return None
        probs, num_draft_tokens = self._acceptance
        return [part.tolist() for part in probs.double().cpu().split(num_draft_tokens)]

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        self._acceptance = None
        if not metadata.max_spec_len:  # vLLM's fails on a batch with top-k and no drafts at all
            return self.sampler(logits, sampling_metadata)
        self._logprob_token_ids = sampling_metadata.logprob_token_ids or {}
        if self._logprob_token_ids:
            # The plain sampler would return only these log-probabilities for the bonus tokens.
            sampling_metadata = replace(
                sampling_metadata,
                logprob_token_ids=None,
                max_num_logprobs=sampling_metadata.max_num_logprobs or 0,
            )
        self._vllms_test = rejection_sampler.rejection_sample
        with swaps.REJECTION_SAMPLE.during(rejection_sampler, self._test):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _record_and_test(self, *args, **options) -> torch.Tensor:
        draft_token_ids, num_draft_tokens, _, _, draft_probs, target_logits, _, sampling = args
        # A draft source's faulty distributions are not reported here: see draft_probs.py.
        if draft_probs is None or draft_probs.shape == target_logits.shape:
            is_greedy: torch.Tensor | bool = sampling.all_greedy
            if not (sampling.all_greedy or sampling.all_random):
                counts = torch.tensor(num_draft_tokens)
                is_greedy = (sampling.temperature == 0).repeat_interleave(counts)
            probs = acceptance_probs(draft_token_ids, draft_probs, target_logits, is_greedy)
            self._acceptance = probs, num_draft_tokens
        return self._vllms_test(*args, **options)

    def apply_logits_processors(self, logits, sampling_metadata, metadata):
        """Process the logits of draft tokens. The plain sampler processes rows without drafts."""
        # Biases come first, as in the plain sampler: a penalty depends on the logit's sign.
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                for place, owner in enumerate(_owners(metadata).tolist()):
                    if bias := processor.biases.get(owner):
                        tokens = torch.tensor(list(bias))
                        values = torch.tensor(list(bias.values()))
                        logits[place, tokens] += values
        # The plain sampler has forced the tokens of thinking budgets, in rows without drafts.
        without_budgets = replace(sampling_metadata, thinking_budget_state_holder=None)
        logits = super().apply_logits_processors(logits, without_budgets, metadata)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                owners = _owners(metadata)
                # vLLM has not divided the logits by the temperature yet.
                temperature = sampling_metadata.temperature[owners]
                temperature = torch.where(temperature < GREEDY_EPSILON, 1.0, temperature)
                min_p = processor.min_p[owners].view(-1)
                unlikely = below_min_p(logits / temperature[:, None], min_p)
                logits.masked_fill_(unlikely, float("-inf"))
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
        index = torch.tensor(token_ids)
        ids[row * row_length, 1 : 1 + len(token_ids)] = index.to(ids.dtype)
        values[row * row_length, 1 : 1 + len(token_ids)] = logprobs[row, index]
    return LogprobsTensors(ids, values, tensors.selected_token_ranks)


def acceptance_probs(
    draft_token_ids: torch.Tensor,  # [num_tokens]
    draft_probs: torch.Tensor | None,  # [num_tokens, vocab_size]; None for one-hot rows
    target_logits: torch.Tensor,  # [num_tokens, vocab_size], processed
    is_greedy: torch.Tensor | bool,  # [num_tokens] bool, or of all
) -> torch.Tensor:  # [num_tokens]
    """Compute the probability that the test accepts each token if it accepts those before it."""
    ids = draft_token_ids.long()[:, None]
    if is_greedy is not False:
        agrees = (target_logits.argmax(-1) == draft_token_ids).float()
        if is_greedy is True:
            return agrees
    probs = softmax(target_logits).gather(1, ids)
    if draft_probs is not None:
        probs /= draft_probs.gather(1, ids)
    probs = probs.nan_to_num(0.0).clamp(max=1.0)[:, 0]
    return probs if is_greedy is False else torch.where(is_greedy, agrees, probs)


class SyntheticTest:
    """Test at given acceptance rates (``rejection_sample_method: synthetic``), on the host.

    vLLM's CPU build has no such test. A rejected token is replaced by the target's most probable
    one, for sampled requests too.

    Args:
        rates: vLLM's, by place.
        direct_rate: that of a direct draft's tokens; None for ``rates``.
        batch: vLLM's input batch.
        seed: the engine's, so that all ranks accept alike.
    """

    def __init__(
        self, rates: list[float], direct_rate: float | None, batch, routes: Routes, seed: int | None
    ) -> None:
        self._rates = rates_by_place(rates)
        self._direct = self._rates if direct_rate is None else [direct_rate] * len(rates)
        self._batch, self._routes = batch, routes
        self._random = random.Random(seed)

    def __call__(self, *args, **options) -> torch.Tensor:  # [batch_size, max_spec_len + 1], int32
        draft_token_ids, num_draft_tokens, max_spec_len, _, _, target_logits, bonus, _ = args
        best = target_logits.argmax(-1).tolist()
        drafts, result = draft_token_ids.tolist(), []
        for row, count in enumerate(num_draft_tokens):
            row_drafts, row_best = drafts[:count], [*best[:count], int(bonus[row])]
            drafts, best = drafts[count:], best[count:]
            is_direct = self._routes.get(self._batch.req_ids[row]) != HIERARCHICAL
            rates = self._direct if is_direct else self._rates
            accepts = [self._random.random() < rate for rate in rates[:count]]
            num = (*accepts, False).index(False)
            token_ids = [*row_drafts[:num], row_best[num]]
            result.append(token_ids + [-1] * (max_spec_len + 1 - len(token_ids)))
        return torch.tensor(result, dtype=torch.int32)
