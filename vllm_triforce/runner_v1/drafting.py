"""Level 1: for each request and round the source that promises most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from vllm_triforce.controller import Controller
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sources.source import Drafted, DraftSource, Offer


@dataclass
class Offers:
    """What each source has for some rows."""

    by_source: Mapping[str, Sequence[Offer | None]]

    def confidence(self, i: int) -> dict[str, int]:
        """Of the sources that have tokens for the ``i``-th row."""
        found = {name: offers[i] for name, offers in self.by_source.items()}
        return {name: offer.confidence for name, offer in found.items() if offer is not None}


@dataclass
class RoutedDraft:
    """What was drafted for each row, and from which source, None from none."""

    drafted: Drafted
    sources: list[str | None]
    confidences: list[int | None]
    with_model: list[bool]
    """Whether a row's tokens took passes of the draft model."""


class Level1:
    """Drafts for level 2, or straight for level 3.

    Args:
        sources: the preferred one first; the others are asked where the controller chooses.
        vocab_size: the target's.
    """

    def __init__(
        self, sources: Sequence[DraftSource], controller: Controller, vocab_size: int
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self._traits = {source.name: source.traits() for source in sources}
        self._controller = controller
        self._vocab_size = vocab_size

    def offers(self, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> Offers:
        """What the sources have that may be used."""
        asked = list(self.sources.values())
        if "gamma" not in self._controller.chooses:
            asked = asked[:1]
        return Offers({source.name: source.offers(batch, proposal, rows) for source in asked})

    def draft(self, batch, proposal, rows, most, sampling, noise) -> RoutedDraft:
        """Drafts at most ``most[i]`` tokens for a pass of level 2, after what is proposed for
        ``rows[i]``."""
        offers = self.offers(batch, proposal, rows)
        confidences = [offers.confidence(i) for i in range(len(rows))]
        chosen = [
            self._controller.choose_draft(
                batch.request_ids[row], batch.has_seed(row), confidence, len(rows), room
            )
            for row, confidence, room in zip(rows, confidences, most)
        ]
        drafted = self.draft_from(chosen, offers, batch, proposal, rows, sampling, noise)
        sources = [source for source, _ in chosen]
        return RoutedDraft(
            drafted,
            sources,
            [
                None if name is None else self._traits[name].confidence(of)
                for name, of in zip(sources, confidences)
            ],
            [name is not None and self.sources[name].needs_model for name in sources],
        )

    def draft_from(
        self,
        chosen: Sequence[tuple[str | None, int]],  # of each row: a source, and how many tokens
        offers: Offers,
        batch: DraftBatch,
        proposal: Proposal,
        rows: Sequence[int],
        sampling,
        noise,
    ) -> Drafted:
        """Each row's tokens, from its source."""
        whole = Drafted.nothing(len(rows))
        for name, source in self.sources.items():
            wanted = [count if source_ == name else 0 for source_, count in chosen]
            if not any(wanted):
                continue
            found = offers.by_source[name]
            part = source.draft(batch, proposal, rows, wanted, found, sampling, noise)
            self._cut(source, part, wanted)
            whole.take(part, [i for i, count in enumerate(wanted) if count])
        return whole

    def draft_directly(
        self,
        name: str,
        batch: DraftBatch,
        proposal: Proposal,
        rows: list[int],
        wanted: list[int],
        offers: Sequence[Offer | None],  # of ``rows``
        noise: InnerNoise,
    ) -> Drafted:
        """Drafts ``wanted[i]`` tokens for ``rows[i]``, all from one source."""
        source, sampling = self.sources[name], None
        if source.needs_model:
            begin_noise(noise, batch, proposal, rows)
            sampling = batch.sampling.take(rows)
        drafted = source.draft(batch, proposal, rows, wanted, offers, sampling, noise)
        self._cut(source, drafted, wanted)
        return drafted

    def _cut(self, source: DraftSource, drafted: Drafted, wanted: Sequence[int]) -> None:
        """Whatever a source says: no more than there are slots for, and none that is no token."""
        if source.needs_model:
            return
        for i, (token_ids, count) in enumerate(zip(drafted.token_ids, wanted)):
            good = takewhile(lambda token: 0 <= token < self._vocab_size, token_ids[:count])
            drafted.token_ids[i] = [int(token) for token in good]

    @property
    def model(self) -> DraftSource | None:
        """The source that asks a draft model; None where there is none."""
        return next((source for source in self.sources.values() if source.needs_model), None)

    def num_uncached_tokens(self, request_id: str, num_tokens: int) -> int:
        """Tokens that level 1 has to read before it can draft."""
        return max(
            source.num_uncached_tokens(request_id, num_tokens) for source in self.sources.values()
        )

    @property
    def num_requests(self) -> int:
        return max(source.num_requests for source in self.sources.values())

    def clean(self, request_id: str) -> None:
        for source in self.sources.values():
            source.clean(request_id)

    def release(self, request_id: str) -> None:
        for source in self.sources.values():
            source.release(request_id)


def begin_noise(noise: InnerNoise, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> None:
    """Each row's noise, by its place in the sequence."""
    seeds = [batch.sampling.seeds[row] for row in rows] if batch.sampling.seeds else []
    noise.begin(seeds, [(batch.num_computed_tokens[r], len(proposal.token_ids[r])) for r in rows])
