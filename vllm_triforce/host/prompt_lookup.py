"""Level 1 without a draft model: prompt lookup over the request's own tokens."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Match:
    """An earlier occurrence of the newest tokens."""

    length: int
    """Tokens that agree."""
    begin: int
    """Index of the token that followed."""


def find_match(token_ids: np.ndarray, max_ngram: int) -> Match | None:
    """The newest earlier occurrence of the longest n-gram at the end that has one.

    Args:
        token_ids: [num_tokens], int.
    """
    last = len(token_ids) - 1
    # Ends of candidate matches: earlier places of the last token, narrowed token by token.
    ends = np.flatnonzero(token_ids[:last] == token_ids[last])
    if not len(ends):
        return None
    length = 1
    for back in range(1, min(max_ngram, last)):
        narrowed = ends[ends >= back]
        narrowed = narrowed[token_ids[narrowed - back] == token_ids[last - back]]
        if not len(narrowed):
            break
        ends, length = narrowed, back + 1
    return Match(length, int(ends[-1]) + 1)


def follow(token_ids: np.ndarray, match: Match, count: int) -> list[int]:
    """``count`` tokens from a match on. Where it reaches the end, the draft itself goes on: a
    loop is drafted as a loop."""
    last = len(token_ids) - 1
    drafted: list[int] = []
    for place in range(match.begin, match.begin + count):
        drafted.append(int(token_ids[place]) if place <= last else drafted[place - last - 1])
    return drafted


def look_up(token_ids: np.ndarray, max_ngram: int, count: int) -> list[int]:
    """``count`` tokens that followed an earlier occurrence of the last n-gram; none without one.

    Args:
        token_ids: [num_tokens], int.
    """
    match = find_match(token_ids, max_ngram)
    return [] if match is None else follow(token_ids, match, count)
