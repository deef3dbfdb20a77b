"""Prompt lookup on the device."""

import torch

from vllm_triforce.kernels.prompt_lookup import gather_tokens, look_up
from vllm_triforce.runner_v2.batch import Placeholders
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


class PromptLookupV2(DraftSourceV2):
    """Drafts the tokens that followed the newest earlier occurrence of the newest n-gram.

    Drafts end before ids that stand for images, which ``placeholders`` knows.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int, placeholders: Placeholders | None = None) -> None:
        self._max_ngram = max_ngram
        self._placeholders = placeholders
        self._tokens: torch.Tensor | None = None

    @classmethod
    def build(cls, parts) -> "PromptLookupV2":
        return cls(parts.context.config.prompt_lookup_max, parts.context.placeholders)

    def draft(self, batch, rows, is_first) -> None:
        if is_first:
            max_len = int(batch.max_computed_tokens.max()) + 1
            self._tokens = gather_tokens(rows, batch.all_token_ids, max_len)
            if self._placeholders is not None:
                self._placeholders.drop_from(self._tokens)
        assert self._tokens is not None, "a proposal's first round comes first"
        max_tokens = batch.all_token_ids.shape[1] + rows.num_speculative_tokens
        look_up(rows, self._tokens, self._max_ngram, max_tokens)

    def end(self, batch, rows) -> None:
        self._tokens = None
