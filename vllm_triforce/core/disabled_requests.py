"""Requests that are no longer speculated on because a level's logits had a NaN."""

from collections.abc import Iterator

from vllm.logger import init_logger

logger = init_logger("vllm.triforce")


class DisabledRequests:
    """Ids of requests that are no longer speculated on because a level's logits had a NaN."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self.has_warned = False
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
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it is decoded without speculation, its output is "
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
