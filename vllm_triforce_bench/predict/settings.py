"""What can be set: a proposal's way to the full pass and its lengths; and the text's acceptance."""

import math
from dataclasses import dataclass

PLAIN, DIRECT, LEVELS = "plain", "direct", "levels"
DRAFT, LOOKUP = "draft", "lookup"
# Of this budget is the acceptance of level 2 that is given.
FULL_BUDGET = 4096
# By what level 2's rejections grow where the budget is halved. docs/results.md:
# 0.057 at 4,096 tokens to 0.131 at 256, at a context of 16,384.
_REJECTIONS_PER_HALVING = 1.23


@dataclass(frozen=True)
class Setting:
    """
    Args:
        route: ``PLAIN``, ``DIRECT`` (level 1's tokens go straight to the full pass) or ``LEVELS``.
        num_tokens: of a proposal, k.
        gamma: tokens that level 1 drafts for a pass of level 2.
        budget: tokens of KV cache that level 2 reads.
        source: of level 1's tokens.
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
    """Of a token, per test.

    Args:
        level2: by the full pass, of what level 2 hands up with a budget of 4,096 tokens.
        draft, lookup: by level 2, of level 1's, by source.
    """

    level2: float
    draft: float = 0.5
    lookup: float = 0.3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"acceptance {name}={value!r} is no share; give one from 0 to 1")

    def at(self, budget: int) -> float:
        """Level 2's, with another budget."""
        halvings = math.log2(FULL_BUDGET / budget)
        return max(0.0, 1 - (1 - self.level2) * _REJECTIONS_PER_HALVING**halvings)

    def by_level2(self, source: str) -> float:
        return self.draft if source == DRAFT else self.lookup

    def straight(self, source: str) -> float:
        """By the full pass, of level 1's: taken to err independently of level 2, which is how the
        simulated world of ``tests/unit/test_decisions_ahead.py`` has it too."""
        return self.by_level2(source) * self.level2


def settings(
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16),
    gammas: tuple[int, ...] = (0, 1, 2, 3, 4),
    budgets: tuple[int, ...] = (512, 1024, 2048, 4096),
    sources: tuple[str, ...] = (DRAFT, LOOKUP),
) -> list[Setting]:
    """All that are compared, decoding plainly first; 0 in ``gammas`` is level 2 by itself.

    Raises:
        ValueError: a number is out of range.
    """
    for name, values, least in (
        ("length", lengths, 1),
        ("gamma", gammas, 0),
        ("budget", budgets, 1),
    ):
        if wrong := [value for value in values if value < least]:
            raise ValueError(f"{name} {wrong[0]} is out of range; give {least} or more")
    found = [STOCK]
    found += [Setting(DIRECT, n, source=source) for n in lengths for source in sources]
    for k in lengths:
        for gamma in sorted({min(gamma, k - 1) for gamma in gammas}):
            for source in sources if gamma else ("",):
                found += [Setting(LEVELS, k, gamma, budget, source) for budget in budgets]
    return found


def shares(option: str, text: str) -> list[float]:
    """Of an option, by commas.

    Raises:
        ValueError: one is no number.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} has {error}; give shares, such as 0.9") from error
