"""Requests that are not speculated on again, because a level's logits had a NaN."""

from collections.abc import Iterator

from vllm.logger import init_logger

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
