"""Lengths by context and configuration alone: for seeded requests, and for given values."""

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.keys import FIXED_GAMMA, FIXED_LENGTH
from vllm_triforce.controller.acceptance import ROUND_PRIOR
from vllm_triforce.controller.routes import (
    HIERARCHICAL,
    PLAIN,
    Candidate,
    Choice,
    MatchClass,
    SourceTraits,
)


def fixed_choice(
    config: ResolvedConfig, max_tokens: int, match_class: MatchClass | None = None
) -> Choice:
    """Return a proposal of at most ``max_tokens``, one at least, by the configuration alone."""
    if config.levels == "1,3":
        num_rounds = -(-max_tokens // config.gamma)
        return Choice(config.sources[0], max_tokens, num_rounds, match_class)
    per_round = 1 if config.levels == "2,3" else int(ROUND_PRIOR)
    return Choice(HIERARCHICAL, max_tokens, -(-max_tokens // per_round))


class FixedLengths:
    """Lengths of proposals and of their drafts."""

    def __init__(self, config: ResolvedConfig, source: SourceTraits) -> None:
        self._config = config
        self._source = source

    def choice(self, candidate: Candidate) -> Choice:
        """Return a request's proposal."""
        length, choices = candidate.max_tokens, self._config.adaptive_keys
        if "length" in choices:
            length = min(length, FIXED_LENGTH)
        if "context" in choices and self.tokens_until(candidate) > 0:
            return PLAIN
        match_class = self._source.match_class(candidate.match_classes)
        return fixed_choice(self._config, length, match_class)

    def tokens_until(self, candidate: Candidate) -> int:
        """Return the tokens of context before speculation begins where ``min_context`` is chosen;
        negative after it."""
        return 2 * self._config.retrieval_budget - candidate.context

    def draft(self, max_tokens: int) -> tuple[str, int]:
        gamma = FIXED_GAMMA if "gamma" in self._config.adaptive_keys else self._config.gamma
        return self._source.name, min(gamma, max_tokens)
