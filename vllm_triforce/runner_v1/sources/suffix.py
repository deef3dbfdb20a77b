"""Suffix decoding (arXiv 2411.04975) by arctic-inference, the library of vLLM's own ``suffix``."""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

from vllm_triforce.runner_v1.sources.source import Draft, DraftSource, Match

# Length of a match and its draft together, least probability of a draft, and the length of a draft
# over its match's. With vLLM's 24, 0.1 and 1 SmolLM2's greedy steps give 7 to 16 % fewer tokens.
_MAX_DEPTH, _MIN_PROB, _MAX_SPEC_FACTOR = 48, 0.1, 2.0
_MAX_ANSWERS, _MAX_ANSWER_TOKENS = 10_000, 1 << 19
_READER = "reader"


@dataclass
class SuffixMatch(Match):
    """Continuation of the newest tokens."""

    token_ids: list[int] = field(default_factory=list)


class Suffix(DraftSource):
    """Suffix decoding.

    Mechanism: drafts the tokens that most often followed the newest ones, in the request or in
    finished answers to requests with the same ``cache_salt``, of any adapter. A request with a seed
    reads its own tokens alone, since its samples must not depend on other requests.
    Confidence: length of the match before each token, less one for each halving of its probability.
    Memory: 350 bytes a token, of each running request that may speculate, and of the newest
    answers, 10,000 or 524,288 tokens at most.
    """

    name = "suffix"
    # Single tokens of 1/4 and 1/2 of their places, then matches of 1 token to 8 or more.
    prior_acceptance = (0.1, 0.15, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)

    def __init__(self) -> None:
        self._own = SuffixDecodingCache(_MAX_DEPTH, max_cached_requests=0)
        self._num_known: dict[str, int] = {}
        """Tokens of each request in its tree."""
        self._tenants: dict[str, str | None] = {}
        self._answers: dict[str | None, SuffixDecodingCache] = {}
        """By tenant. The library searches for a running request, here the empty ``_READER``."""
        self._by_age: deque[tuple[str, int, int]] = deque()
        """Tenant, number and tokens of each answer."""
        self._numbers, self._num_answer_tokens = itertools.count(), 0

    def find_matches(self, batch, proposal, rows) -> list[SuffixMatch | None]:
        for row in rows:
            request_id, token_ids = batch.request_ids[row], batch.token_ids[row]
            if request_id not in self._num_known:
                self._own.start_request(request_id, [])
                self._tenants[request_id] = batch.tenants[row] if batch.tenants else None
            # Without the newest token, which would count as a place that nothing followed.
            new_ids = token_ids[self._num_known.get(request_id, 0) : -1]
            self._own.add_active_response(request_id, new_ids)
            self._num_known[request_id] = len(token_ids) - 1
        return [self._match(batch.request_ids[r], batch.context(proposal, r)) for r in rows]

    def _match(self, request_id: str, token_ids: np.ndarray) -> SuffixMatch | None:
        """Find the longest match, of equal ones the request's own."""
        places = [(self._own, request_id)]
        if (tenant := self._tenants[request_id]) in self._answers:
            places.append((self._answers[tenant], _READER))
        pattern = token_ids[-_MAX_DEPTH:]
        drafts = [
            cache.speculate(name, pattern, _MAX_DEPTH, _MAX_SPEC_FACTOR, min_token_prob=_MIN_PROB)
            for cache, name in places
        ]
        found = max(drafts, key=lambda draft: draft.match_len)
        if not found.token_ids:
            return None
        # The library's probabilities are of whole drafts, up to each token.
        shares = [p / before for p, before in zip(found.probs, [1.0, *found.probs])]
        lengths = itertools.count(found.match_len)
        classes = (min(n, 8) + 1 + round(math.log2(share)) for n, share in zip(lengths, shares))
        return SuffixMatch(tuple(classes), found.token_ids)

    def draft(self, batch, proposal, rows, max_tokens, matches, sampling, noise) -> Draft:
        pairs = zip(matches, max_tokens)
        return Draft([[] if match is None else match.token_ids[:count] for match, count in pairs])

    def add_answer(self, request_id, token_ids) -> None:
        if (tenant := self._tenants.get(request_id)) is None or not token_ids:
            return
        if tenant not in self._answers:
            self._answers[tenant] = SuffixDecodingCache(_MAX_DEPTH, max_cached_requests=-1)
            self._answers[tenant].start_request(_READER, [])
        answers, number = self._answers[tenant], next(self._numbers)
        answers.start_request(number, [])
        answers.add_active_response(number, np.array(token_ids, dtype=np.int32))
        answers.stop_request(number)
        self._by_age.append((tenant, number, len(token_ids)))
        self._num_answer_tokens += len(token_ids)
        while self._num_answer_tokens > _MAX_ANSWER_TOKENS or len(self._by_age) > _MAX_ANSWERS:
            tenant, number, num_tokens = self._by_age.popleft()
            self._num_answer_tokens -= num_tokens
            self._answers[tenant].evict_cached_response(number)
            if len(self._answers[tenant].cached_requests) == 1:
                del self._answers[tenant]

    @property
    def num_requests(self) -> int:
        return len(self._num_known)

    def release(self, request_id: str) -> None:
        if self._num_known.pop(request_id, None) is not None:
            self._own.stop_request(request_id)
            del self._tenants[request_id]
