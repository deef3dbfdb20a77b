"""Eligibility of requests for speculation and the maximum length of a proposal, for both runners.

Runner V2's lengths are on the device, where ``kernels/rows.py`` applies the same rule.
"""

from collections.abc import Iterator

from vllm.logger import init_logger

from vllm_triforce.core.sampling import GREEDY_EPSILON

logger = init_logger("vllm.triforce")


def decodes_plainly(params) -> bool:
    """True if a request's sampling parameters exclude it from speculation.

    vLLM returns the log-probabilities of ``logprob_token_ids`` for a row with a single token only.

    Args:
        params: vLLM's ``SamplingParams``.
    """
    return bool(params.logprob_token_ids)


def is_greedy(params) -> bool:
    """True if a request with vLLM's ``SamplingParams`` takes the likeliest tokens."""
    return params.temperature < GREEDY_EPSILON


def sampling_seed(params) -> int | None:
    """Return the seed of a sampled request, None for greedy and unseeded requests.

    Args:
        params: vLLM's ``SamplingParams``, or None.
    """
    return None if params is None or is_greedy(params) else params.seed


def max_proposal_len(
    num_computed: int, max_tokens: int, num_reserved: int, max_len: int, min_context: int = 0
) -> int:
    """Return how many tokens may be proposed for a request; none if the result is not positive.

    Args:
        num_computed: tokens whose KV the full pass has written and accepted.
        max_tokens: limit by the plan or the configuration.
        num_reserved: tokens that fit the request's allocated blocks. Level 2 writes there too.
        max_len: number of tokens at which the request ends, at most ``max_model_len``. The
            scheduler keeps inputs below it (vllm/v1/core/sched/scheduler.py), and the full pass
            adds one token.
        min_context: minimum number of computed tokens.
    """
    if num_computed < min_context:
        return 0
    return min(max_tokens, num_reserved - num_computed, max_len - 2 - num_computed)


class DisabledRequests:
    """Ids of requests that are no longer speculated on because a level's logits had a NaN."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self._has_warned = False
        self.num_disabled = 0
        """Number of requests disabled since the engine started."""

    def add(self, request_id: str, level: str) -> None:
        """Disable a request.

        Args:
            level: level with the NaN, as a possessive for the log: ``level 2's``.
        """
        if request_id in self._request_ids:
            return
        self._request_ids.add(request_id)
        self.num_disabled += 1
        self.warn(request_id, level)

    def warn(self, request_id: str, level: str) -> None:
        """Log a warning for the first request."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it goes on without speculation, its output is "
                "not affected. Further requests are counted (vllm:triforce_nan_requests_total), "
                "not logged; check the model's weights and dtype.",
                level,
                request_id,
            )

    def discard(self, request_id: str) -> None:
        """Forget a request that has left the engine."""
        self._request_ids.discard(request_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._request_ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._request_ids)

    def __len__(self) -> int:
        return len(self._request_ids)
