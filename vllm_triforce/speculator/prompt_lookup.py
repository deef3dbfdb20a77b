"""Level 1 without a draft model: prompt lookup over the request's own tokens."""

import numpy as np

from vllm_triforce.speculator.level1 import Drafted, Level1


class PromptLookupLevel(Level1):
    """Drafts what followed the newest earlier occurrence of the longest matching n-gram.

    Args:
        max_ngram: longest n-gram that is looked up, in tokens.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def draft(self, batch, proposal, rows, wanted, sampling, noise) -> Drafted:
        return Drafted(
            [
                look_up(_context(batch, proposal, row), self.max_ngram, count) if count else []
                for row, count in zip(rows, wanted)
            ]
        )


def _context(batch, proposal, row) -> np.ndarray:
    proposed = np.asarray(proposal.token_ids[row], dtype=np.int32)
    return np.concatenate([batch.token_ids[row], proposed])


def look_up(token_ids: np.ndarray, max_ngram: int, count: int) -> list[int]:
    """At most ``count`` tokens that followed an earlier occurrence of the last n-gram.

    Args:
        token_ids: [num_tokens], int.
    """
    last = len(token_ids) - 1
    # Ends of candidate matches: earlier places of the last token, narrowed token by token.
    ends = np.flatnonzero(token_ids[:last] == token_ids[last])
    for back in range(1, min(max_ngram, last)):
        narrowed = ends[ends >= back]
        narrowed = narrowed[token_ids[narrowed - back] == token_ids[last - back]]
        if not len(narrowed):
            break
        ends = narrowed
    if not len(ends):
        return []
    # Where the match reaches the end, the draft itself goes on: a loop is drafted as a loop.
    begin = int(ends[-1]) + 1
    drafted: list[int] = []
    for place in range(begin, begin + count):
        known = place <= last
        drafted.append(int(token_ids[place]) if known else drafted[place - last - 1])
    return drafted
