"""What is done where nothing is chosen: for requests with a seed, and for given values."""

from collections.abc import Sequence

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.keys import FIXED_GAMMA, FIXED_LENGTH
from vllm_triforce.controller.options import Candidate
from vllm_triforce.controller.routes import LEVELS, PLAIN, Choice, SourceTraits


class FixedChoices:
    """By context and configuration alone, never by times or by what was accepted."""

    def __init__(self, config: ResolvedConfig, sources: Sequence[SourceTraits]) -> None:
        self._config = config
        self._source = sources[0]

    def choice(self, candidate: Candidate) -> Choice:
        """What a request does in a step."""
        length, choices = candidate.most, self._config.adaptive_keys
        if "length" in choices:
            length = min(length, FIXED_LENGTH)
        if "context" in choices and self.tokens_until(candidate) > 0:
            return PLAIN
        if self._config.levels == "1,3":
            confidence = self._source.confidence(candidate.confidence)
            return Choice(self._source.name, length, confidence)
        return Choice(LEVELS, length)

    def tokens_until(self, candidate: Candidate) -> int:
        """Tokens of context that a request is short of being speculated on where the least context
        was not given; negative beyond."""
        return 2 * self._config.retrieval_budget - candidate.context

    def level1(self, most: int) -> tuple[str, int]:
        """Level 1's source and how many of its ``most`` tokens; a given gamma holds for every
        request."""
        gamma = FIXED_GAMMA if "gamma" in self._config.adaptive_keys else self._config.gamma
        return self._source.name, min(gamma, most)
