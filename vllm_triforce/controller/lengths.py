"""Lengths of drafts and proposals: chosen per round, or fixed."""

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.keys import FIXED_GAMMA, FIXED_LENGTH
from vllm_triforce.controller.acceptance import ROUND_PRIOR, Acceptance, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
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
    """Lengths by context and configuration alone: for seeded requests, and for given values."""

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


class DraftLengths:
    """Source and length of a round's draft, by the tokens that a round adds per second.

    The first of ``sources`` wins where several add the same.
    """

    def __init__(
        self, config: ResolvedConfig, sources: Sequence[SourceTraits], acceptance: Acceptance
    ) -> None:
        self._config = config
        self._sources = sources
        self._acceptance = acceptance
        self._model: CostModel
        self._round_s: dict[tuple[int, bool], np.ndarray] = {}

    def use_costs(self, model: CostModel) -> None:
        self._model = model
        self._round_s.clear()

    def best(
        self,
        request_id: str,
        match_classes: Mapping[str, MatchClass | None],
        num_rows: int,
        max_tokens: int,
    ) -> tuple[str | None, int]:
        """Return the fastest source of a round's draft, None for no draft, and the length.

        Args:
            match_classes: by source, None for no tokens.
            num_rows: requests in this round.
            max_tokens: that level 2 has room for.
        """
        rates = self._acceptance.of(request_id)
        best: tuple[str | None, int] = None, 0
        best_speed = 0.0
        for source in self._sources:
            index = source.match_class(match_classes)
            if index is None:
                continue
            longest = min(self._config.gamma, max_tokens) if source.takes_passes else max_tokens
            by_place = np.array(rates.by_place(source.name, True, index, longest))
            round_s = self._round_seconds(num_rows, source.takes_passes)
            speeds = (1 + expected_by_length(by_place)) / round_s[: longest + 1]
            if (speed := float(speeds.max())) > best_speed:
                best, best_speed = (source.name, int(speeds.argmax())), speed
        return best

    def _round_seconds(self, num_rows: int, takes_passes: bool) -> np.ndarray:
        """Return the seconds of rounds with drafts of 0, 1 ... tokens, [max_tokens + 1]."""
        key = num_rows, takes_passes
        if key not in self._round_s:
            model, num_lengths = self._model, self._config.num_speculative_tokens + 1
            drafts_s = takes_passes * model.draft(num_rows) * np.arange(num_lengths)
            level2_s = [model.level2(num_rows, n + 1) for n in range(num_lengths)]
            self._round_s[key] = drafts_s + np.array(level2_s)
        return self._round_s[key]
