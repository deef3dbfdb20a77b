"""Who is speculated on, and how long a proposal may be: what both runners hold to.

Runner V2 knows lengths on the device alone, where ``kernels/bookkeeping.py`` applies ``room()``.
"""

from vllm_triforce.verification.sampling_rows import GREEDY_EPSILON


def decodes_plainly(params) -> bool:
    """Whether a request's sampling parameters keep it from being speculated on:
    ``logprob_token_ids`` are for a row's only token.

    Args:
        params: vLLM's ``SamplingParams``.
    """
    return bool(params.logprob_token_ids)


def seed_of_draws(params) -> int | None:
    """Return the seed that a request draws by: None without one, and where nothing is drawn.

    Args:
        params: vLLM's ``SamplingParams``, or None.
    """
    if params is None or params.temperature < GREEDY_EPSILON:
        return None
    return params.seed


def room(num_computed: int, most: int, reserved: int, limit: int, min_context: int = 0) -> int:
    """Tokens that may be proposed for a request; none if it is not positive.

    Args:
        num_computed: tokens whose KV the full pass has written and accepted.
        most: tokens of a proposal at most.
        reserved: tokens that the request's blocks hold: level 2 writes there too.
        limit: tokens at which the request ends, ``max_model_len`` at most. The scheduler keeps
            inputs below it (v1/core/sched/scheduler.py), and the full pass adds a token of its own.
        min_context: tokens of context below which nothing is proposed.
    """
    if num_computed < min_context:
        return 0
    return min(most, reserved - num_computed, limit - 2 - num_computed)
