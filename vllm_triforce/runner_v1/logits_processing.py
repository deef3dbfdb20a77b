"""Logits processing of requests for levels 1 and 2, so that level 3 accepts their drafts.

Applied in the order of vLLM's sampler (vllm/v1/sample/sampler.py): ``allowed_token_ids``,
``bad_words``, ``min_tokens``, ``logit_bias``, penalties.
"""

from collections.abc import Iterable

import numpy as np
import torch

from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal

# Repetition, frequency and presence penalty.
_NO_PENALTIES = (1.0, 0.0, 0.0)


class LogitsProcessing:
    """Logits processing of one request after one full pass.

    Args:
        params: vLLM's ``SamplingParams``.
        token_ids: [num_tokens], int: prompt, output and the token just sampled.
    """

    def __init__(
        self,
        params,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        def ids(tokens) -> torch.Tensor:
            return torch.tensor(list(tokens), dtype=torch.int64, device=device)

        output = token_ids[num_prompt_tokens:]
        self._vocab_size = vocab_size
        allowed = params.allowed_token_ids
        self._allowed = ids(allowed) if allowed else None
        self._words = params.bad_words_token_ids or []
        # Newest tokens that may be the prefix of a bad word.
        max_prefix = max(map(len, self._words), default=1) - 1
        self._newest = output[len(output) - min(max_prefix, len(output)) :].tolist()
        self._num_output, self._min_tokens = len(output), params.min_tokens
        self._stops = [token for token in params.all_stop_token_ids if token < vocab_size]
        self._bias = None
        if bias := params.logit_bias:
            values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
            self._bias = ids(bias), values
        self._penalties = _penalties(params)
        if self._penalties != _NO_PENALTIES:
            # A tokenizer may have more tokens than the model.
            seen = np.flatnonzero(np.bincount(token_ids)[:vocab_size])
            counts = np.bincount(output, minlength=vocab_size)[seen].astype(np.float32)
            self._seen = torch.from_numpy(seen).to(device)
            self._counts = torch.from_numpy(counts).to(device)

    @classmethod
    def for_request(
        cls, params, token_ids: np.ndarray, num_prompt_tokens: int, *others
    ) -> "LogitsProcessing | None":
        """Create the processing of a request, None if it changes no logits any more.

        Arguments are those of the class.
        """
        has_any = (
            params.allowed_token_ids
            or params.bad_words_token_ids
            or len(token_ids) - num_prompt_tokens < params.min_tokens
            or params.logit_bias
            or _penalties(params) != _NO_PENALTIES
        )
        return cls(params, token_ids, num_prompt_tokens, *others) if has_any else None

    def __call__(
        self,
        logits: torch.Tensor,  # [vocab_size], float32, changed in place
        new: list[int],  # tokens after ``token_ids``
    ) -> None:
        """Process the logits of the token after ``new``."""
        forbidden = self._forbidden(new)
        if self._allowed is not None:
            bad = torch.tensor(forbidden, dtype=torch.int64, device=logits.device)
            allowed = self._allowed[~torch.isin(self._allowed, bad)]
            if not len(allowed):
                return  # no token is left: level 3 decides
            allowed_logits = logits[allowed]
            logits.fill_(float("-inf"))[allowed] = allowed_logits
        elif forbidden:
            logits[forbidden] = float("-inf")
        if self._bias is not None:
            tokens, values = self._bias
            logits[tokens] += values
        if self._penalties != _NO_PENALTIES:
            self._penalize(logits, new)

    def _forbidden(self, new: list[int]) -> list[int]:
        """Return last tokens of bad words that have begun, and stop tokens before min_tokens."""
        tokens, forbidden = self._newest + new, []
        for *prefix, last in self._words:
            has_begun = tokens[max(0, len(tokens) - len(prefix)) :] == prefix
            if has_begun and last < self._vocab_size:
                forbidden.append(last)
        if self._num_output + len(new) < self._min_tokens:
            forbidden += self._stops
        return forbidden

    def _penalize(self, logits: torch.Tensor, new: list[int]) -> None:
        """Apply the penalties to tokens that occurred, which are few in a vocabulary."""
        repetition, frequency, presence = self._penalties
        seen, counts = self._seen, self._counts
        if new:
            more = torch.tensor(new, device=logits.device)
            counts = counts + (seen[:, None] == more).sum(1)
            unseen = more[~torch.isin(more, seen)]
            counts = torch.cat([counts, (unseen[:, None] == unseen).sum(1)])
            seen = torch.cat([seen, unseen])
        values = logits[seen]
        values *= torch.where(values > 0, 1.0 / repetition, repetition)
        values -= frequency * counts
        logits[seen] = values - presence * (counts > 0)


def process_logits(
    logits: torch.Tensor,  # [num_places, vocab_size]
    batch: DraftBatch,
    proposal: Proposal,
    places: Iterable[tuple[int, list[int]]],
) -> torch.Tensor:  # [num_places, vocab_size], float32 if any request changes its logits
    """Process the logits of every place. ``logits`` may be changed in place.

    Args:
        places: the row of the batch and the tokens drafted after its proposal, per place.
    """
    if not any(batch.logits_processors):
        return logits
    logits = logits.float()
    for place_logits, (row, draft) in zip(logits, places):
        if (processor := batch.logits_processors[row]) is not None:
            processor(place_logits, [*proposal.token_ids[row], *draft])
    return logits


def _penalties(params) -> tuple[float, float, float]:
    """Return the repetition, frequency and presence penalty."""
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
