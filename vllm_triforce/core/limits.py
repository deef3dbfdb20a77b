"""May a request propose, and how much? The rule of both schedulers and both runners.

On Runner V2 lengths are on the device, where ``kernels/rows.py`` applies the rule of
``room_for_proposal()``.
"""

from vllm.logger import init_logger

from vllm_triforce.config.request_args import request_limit

logger = init_logger("vllm.triforce")

# Same as _SAMPLING_EPS in vllm/v1/sample/sampler.py.
GREEDY_EPSILON = 1e-5


def decodes_plainly(params) -> bool:
    """True if a request's ``SamplingParams`` exclude it from speculation on Runner V1."""
    # vLLM's thinking budgets on Runner V1 take one token a step (``runner_v1/rejection.py``).
    return params.thinking_token_budget is not None or proposal_limit(params, 1) == 0


def proposal_limit(params, max_tokens: int) -> int:
    """Return how many of ``max_tokens`` may be proposed for a request with these parameters."""
    if params.logprob_token_ids:  # vLLM returns these for a row with a single token only
        return 0
    limit = request_limit(params) if params.extra_args else None
    return max_tokens if limit is None else min(max_tokens, limit)


def is_greedy(params) -> bool:
    """True if a request takes the likeliest tokens."""
    return params.temperature < GREEDY_EPSILON


def sampling_seed(params) -> int | None:
    """Return the seed of a sampled request, None for greedy and unseeded requests."""
    return None if params is None or is_greedy(params) else params.seed


def room_for_proposal(
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


class DisabledRequests(set[str]):
    """Ids of requests that are no longer speculated on because a level's logits had a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.has_warned = False
        self.num_disabled = 0
        """Number of requests disabled since the engine started."""

    def disable(self, request_id: str, level: str) -> None:
        """Disable a request.

        Args:
            level: level with the NaN, as a possessive for the log: ``level 2's``.
        """
        if request_id not in self:
            self.add(request_id)
            self.num_disabled += 1
            self.warn(request_id, level)

    def warn(self, request_id: str, level: str) -> None:
        """Log a warning for the first request."""
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it is decoded without speculation, its output is "
                "not affected. Further requests are counted (vllm:triforce_nan_requests_total), "
                "not logged; check the model's weights and dtype.",
                level,
                request_id,
            )
