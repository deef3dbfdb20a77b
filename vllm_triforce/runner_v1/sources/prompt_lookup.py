"""Prompt lookup: what followed the newest tokens when they occurred before."""

from dataclasses import dataclass

import numpy as np

from vllm_triforce.runner_v1.sources.source import Offer, TokenSource


@dataclass
class Match(Offer):
    """An earlier occurrence of the newest tokens."""

    begin: int = 0
    """Index of the token that followed."""


class PromptLookup(TokenSource):
    """Prompt lookup.

    Mechanism: the longest n-gram at the end that occurred before; the newest such place.
    Confidence: by the length of the match: what followed a long one is nearly certain.
    Parameters: ``prompt_lookup_max``.
    """

    name = "prompt_lookup"
    # By docs/results/2026-11-21-cpu.md, 0.62 in all; from 1 token to 8 or more.
    prior_acceptance = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram

    @classmethod
    def build(cls, parts) -> "PromptLookup":
        return cls(parts.config.prompt_lookup_max)

    def find(self, token_ids: np.ndarray) -> Match | None:
        """The newest earlier occurrence of the longest n-gram at the end that has one."""
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
        return Match(min(length, len(self.prior_acceptance)) - 1, int(ends[-1]) + 1)

    def follow(self, token_ids: np.ndarray, offer: Match, count: int) -> list[int]:
        """Where a match reaches the end, the draft itself goes on: a loop is drafted as a loop."""
        last = len(token_ids) - 1
        drafted: list[int] = []
        for place in range(offer.begin, offer.begin + count):
            drafted.append(int(token_ids[place]) if place <= last else drafted[place - last - 1])
        return drafted
