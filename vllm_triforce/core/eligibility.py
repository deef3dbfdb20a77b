"""Who is speculated on, and how long a proposal may be: what both runners hold to.

Runner V2's lengths are on the device, where ``kernels/row_state.py`` applies the same rule.

Requests that are not speculated on again, because a level's logits had a NaN.
"""

from collections.abc import Iterator

from vllm.logger import init_logger

from vllm_triforce.core.sampling import GREEDY_EPSILON


def decodes_plainly(params) -> bool:
    """Whether a request's sampling parameters keep it from being speculated on:
    ``logprob_token_ids`` are for a row's only token.

    Args:
        params: vLLM's ``SamplingParams``.
    """
    return bool(params.logprob_token_ids)


def sampling_seed(params) -> int | None:
    """Return the seed that a request draws by: None without one, and where nothing is drawn.

    Args:
        params: vLLM's ``SamplingParams``, or None.
    """
    if params is None or params.temperature < GREEDY_EPSILON:
        return None
    return params.seed


def max_proposal_len(
    num_computed: int, most: int, reserved: int, limit: int, min_context: int = 0
) -> int:
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


logger = init_logger("vllm.triforce")


class DisabledRequests:
    """Their names; the first one is logged, all are counted."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._has_warned = False
        self.num_disabled = 0
        """Since the engine started."""

    def add(self, request_id: str, whose: str) -> None:
        """
        Args:
            whose: logits they were.
        """
        if request_id in self._names:
            return
        self._names.add(request_id)
        self.num_disabled += 1
        self.warn(request_id, whose)

    def warn(self, request_id: str, whose: str) -> None:
        """Logs the first one."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it goes on without speculation, its output is "
                "not affected. Further requests are counted (vllm:triforce_nan_requests_total), "
                "not logged; check the model's weights and dtype.",
                whose,
                request_id,
            )

    def discard(self, request_id: str) -> None:
        """A request that has left the engine."""
        self._names.discard(request_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
