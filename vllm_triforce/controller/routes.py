"""Requests of a decision, routes and choices, and traits of draft sources."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Route = str
"""Way of a proposal to the full pass: ``HIERARCHICAL`` through levels 1 and 2, the name of a source
whose tokens go straight there, or ``PLAIN_ROUTE`` for no proposal."""

PLAIN_ROUTE: Route = "plain"
HIERARCHICAL: Route = "levels 1 and 2"
# On Runner V2, of requests by ``HIERARCHICAL`` for which level 1 has no drafts.
LEVEL2_ALONE: Route = "level 2"

MatchClass = int | tuple[int, ...]
"""Class of a draft's first token, each further one a class above; or the class of each token."""


@dataclass
class Candidate:
    """A request that could be speculated on in this step."""

    request_id: str
    context: int
    """Tokens."""
    max_tokens: int
    """Longest proposal that fits."""
    match_classes: Mapping[str, MatchClass | None] = field(default_factory=dict)
    """Match class by source, None for no tokens; sources that always have some may be missing."""
    has_seed: bool = False
    is_greedy: bool = True


@dataclass(frozen=True)
class Choice:
    """A proposal of at most ``num_tokens`` by a route.

    Args:
        num_rounds: maximum number of rounds of level 1, on Runner V2. With level 2 each round adds
            at least one token. A proposal that is still shorter after the last round is verified as
            it is.
        match_class: of the source's match; None by ``HIERARCHICAL``.
    """

    route: Route
    num_tokens: int
    num_rounds: int = 0
    match_class: MatchClass | None = None


PLAIN = Choice(PLAIN_ROUTE, 0)


@dataclass(frozen=True)
class SourceTraits:
    """Traits of a source of level 1's tokens.

    Args:
        name: the route's name.
        prior_acceptance: by level 2, for each match class. A draft's first token is of the
            class that its match has, each further one a class above.
        takes_passes: True if each token takes a pass of the draft model. Such a source always has
            tokens; any other takes no time and has tokens where it finds a match.
    """

    name: str
    prior_acceptance: tuple[float, ...]
    takes_passes: bool = False

    def __post_init__(self) -> None:
        if not self.prior_acceptance or not all(0 <= p <= 1 for p in self.prior_acceptance):
            raise ValueError(
                f"draft source {self.name!r} has prior_acceptance={self.prior_acceptance!r}; give "
                "a share from 0 to 1 for each match class, one at least"
            )

    def match_class(self, classes: Mapping[str, MatchClass | None]) -> MatchClass | None:
        """Return the class of a request's tokens, within ``prior_acceptance``; None for no tokens.

        Args:
            classes: by source, None for no tokens; sources that take passes have tokens where they
                are missing.
        """
        found = classes.get(self.name, 0 if self.takes_passes else None)
        last = len(self.prior_acceptance) - 1
        if isinstance(found, tuple):
            return tuple(max(0, min(index, last)) for index in found)
        return None if found is None else max(0, min(found, last))
