"""Settings of speculation that are compared, and the acceptance that they meet."""

import math
from dataclasses import dataclass

from vllm_triforce.config import ResolvedConfig

PLAIN, DIRECT, LEVELS = "plain", "direct", "levels"
DRAFT, LOOKUP = "draft", "lookup"
_LENGTHS, _GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16), (0, 1, 2, 3, 4)
# Retrieval budget at which ``Acceptance.level2`` is given.
FULL_BUDGET = 4096
# Growth of level 2's rejections when the budget is halved (docs/results.md: 0.057
# at 4,096 tokens to 0.131 at 256, at a context of 16,384).
_REJECTIONS_PER_HALVING = 1.23


@dataclass(frozen=True)
class Setting:
    """Route and lengths of a proposal.

    Args:
        route: ``PLAIN``, ``DIRECT`` (level 1's tokens go straight to the full pass) or ``LEVELS``.
        num_tokens: tokens of a proposal, k.
        gamma: tokens that level 1 drafts for a pass of level 2.
        budget: tokens of KV cache that level 2 reads.
        source: draft source of level 1.
    """

    route: str
    num_tokens: int = 0
    gamma: int = 0
    budget: int = 0
    source: str = ""

    def __str__(self) -> str:
        if self.route == PLAIN:
            return "plain"
        if self.route == DIRECT:
            return f"{self.source} {self.num_tokens}"
        return f"levels {self.num_tokens}/{self.gamma}@{self.budget} {self.source}".rstrip()


STOCK = Setting(PLAIN)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates per tested token.

    Args:
        level2: of level 2's tokens by the full pass, at a budget of 4,096 tokens.
        draft, lookup: of level 1's tokens by level 2, by source.
        copy_rejections: factor on level 2's rejections, by a copy of the target.
    """

    level2: float
    draft: float = 0.5
    lookup: float = 0.3
    copy_rejections: float = 1.0

    def at(self, budget: int) -> float:
        """Level 2's acceptance at another budget."""
        halvings = math.log2(FULL_BUDGET / budget)
        rejections = (1 - self.level2) * self.copy_rejections
        return max(0.0, 1 - rejections * _REJECTIONS_PER_HALVING**halvings)

    def by_level2(self, source: str) -> float:
        return self.draft if source == DRAFT else self.lookup

    def direct(self, source: str) -> float:
        """Acceptance of level 1's tokens by the full pass.

        Levels 1 and 2 are taken to err independently.
        """
        return self.by_level2(source) * self.level2


def sources_of(config: ResolvedConfig) -> tuple[str, ...]:
    """Return the kinds of the sources that an engine drafts from."""
    return tuple(LOOKUP if name == "prompt_lookup" else DRAFT for name in config.sources)


def settings(budget: int, sources: tuple[str, ...], levels: str = "1,2,3") -> list[Setting]:
    """List the settings to compare, plain decoding first; ``gamma=0`` is level 2 alone."""
    candidates = [STOCK]
    if "1" in levels:
        candidates += [Setting(DIRECT, n, source=source) for n in _LENGTHS for source in sources]
    for k in _LENGTHS if "2" in levels else ():
        for gamma in sorted({min(gamma, k - 1) for gamma in _GAMMAS}):
            for source in sources if gamma else ("",):
                candidates.append(Setting(LEVELS, k, gamma, budget, source))
    return candidates
