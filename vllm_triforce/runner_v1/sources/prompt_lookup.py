"""Prompt lookup: draft the tokens that followed an earlier occurrence of the newest tokens."""

from dataclasses import dataclass

import numpy as np

from vllm_triforce.runner_v1.sources.source import Match, TokenSource


@dataclass
class NgramMatch(Match):
    """Earlier occurrence of the newest tokens."""

    begin: int = 0
    """Index of the token that followed it."""


class PromptLookup(TokenSource):
    """Prompt lookup.

    Mechanism: finds the longest n-gram at the end that occurred before, at its newest place.
    Confidence: length of the n-gram. The tokens after a long one are nearly always accepted.
    Parameters: ``prompt_lookup_max``.
    """

    name = "prompt_lookup"
    # N-grams of 1 token to 8 or more: about those of SmolLM2 (docs/results.md).
    prior_acceptance = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram

    @classmethod
    def build(cls, parts) -> "PromptLookup":
        return cls(parts.config.prompt_lookup_max)

    def find(self, token_ids: np.ndarray) -> NgramMatch | None:
        """Find the newest earlier occurrence of the longest n-gram at the end that has one."""
        last = len(token_ids) - 1
        # Ends of candidate matches: earlier places of the last token, narrowed token by token.
        ends = np.flatnonzero(token_ids[:last] == token_ids[last])
        if not len(ends):
            return None
        length = 1
        for back in range(1, min(self._max_ngram, last)):
            narrowed = ends[ends >= back]
            narrowed = narrowed[token_ids[narrowed - back] == token_ids[last - back]]
            if not len(narrowed):
                break
            ends, length = narrowed, back + 1
        return NgramMatch(min(length, len(self.prior_acceptance)) - 1, int(ends[-1]) + 1)

    def continue_from(self, token_ids: np.ndarray, match: NgramMatch, count: int) -> list[int]:
        """Copy tokens from the match on; past the end, copy the draft, so that loops repeat."""
        last = len(token_ids) - 1
        drafted_ids: list[int] = []
        for place in range(match.begin, match.begin + count):
            token = token_ids[place] if place <= last else drafted_ids[place - last - 1]
            drafted_ids.append(int(token))
        return drafted_ids
