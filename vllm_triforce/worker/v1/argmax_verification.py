"""Greedy verification of a full pass, Model Runner V1, on the host of a CPU engine."""

import torch
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def only_argmax_counts(sampling: SamplingMetadata) -> bool:
    """Whether each token is the largest logit's, and nothing else is asked for."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.all_greedy
        and sampling.no_penalties
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and not any(map(_changes_argmax, sampling.logitsprocs.non_argmax_invariant))
    )


def accepted_argmax(metadata: SpecDecodeMetadata, largest: list[int]) -> torch.Tensor:
    """vLLM's greedy test on the host: its dozen small tensors take longer than the comparison.

    Args:
        largest: each request's draft tokens' argmax and its bonus token's, one request after the
            other.

    Returns:
        [batch_size, max_spec_len + 1], int32: what is accepted and the token after that, then
        placeholders.
    """
    drafted = iter(metadata.draft_token_ids.tolist())
    rows, start = [], 0
    for count in metadata.num_draft_tokens:
        best = largest[start : start + count + 1]
        start += count + 1
        agrees = [next(drafted) == token for token in best[:count]]
        num_accepted = (*agrees, False).index(False)
        padding = [PLACEHOLDER_TOKEN_ID] * (metadata.max_spec_len - num_accepted)
        rows.append(best[: num_accepted + 1] + padding)
    return torch.tensor(rows, dtype=torch.int32)


def _changes_argmax(processor) -> bool:
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return True
