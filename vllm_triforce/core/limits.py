"""May a request propose, and how much? The rule of both schedulers and both runners.

On Runner V2 lengths are on the device, where ``kernels/rows.py`` applies the rule of
``room_for_proposal()``.
"""

from vllm_triforce.config.request_args import request_limit

# Same as _SAMPLING_EPS in vllm/v1/sample/sampler.py.
GREEDY_EPSILON = 1e-5


def decodes_plainly(params) -> bool:
    """True if a request's sampling parameters exclude it from speculation.

    vLLM returns the log-probabilities of ``logprob_token_ids`` for a row with a single token only.

    Args:
        params: vLLM's ``SamplingParams``.
    """
    return proposal_limit(params, 1) == 0


def proposal_limit(params, max_tokens: int) -> int:
    """Return how many of ``max_tokens`` may be proposed for a request with these parameters."""
    if params.logprob_token_ids:
        return 0
    limit = request_limit(params)
    return max_tokens if limit is None else min(max_tokens, limit)


def is_greedy(params) -> bool:
    """True if a request with vLLM's ``SamplingParams`` takes the likeliest tokens."""
    return params.temperature < GREEDY_EPSILON


def sampling_seed(params) -> int | None:
    """Return the seed of a sampled request, None for greedy and unseeded requests.

    Args:
        params: vLLM's ``SamplingParams``, or None.
    """
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
