"""Promise: whatever a source of drafts says, no proposal has more tokens than there are slots for,
and none that is no token."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_triforce.controller.routes import Choice, SourceTraits
from vllm_triforce.core.sampling import SamplingRows
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.runner_v1.draft_batch import Proposal
from vllm_triforce.runner_v1.drafting import Level1, Matches
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sources.source import Draft, Match, TokenSource
from vllm_triforce.runner_v1.speculator import TriForceSpeculator


class Careless(TokenSource):
    """Gives what it was told to give, whatever was asked."""

    name = "careless"
    prior_acceptance = (0.5,)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def find(self, token_ids):
        return Match(9)

    def continue_from(self, token_ids, match, count):
        return self._tokens


@pytest.mark.parametrize(
    "given, drafted",
    [([1, 2, 3, 4, 5], [1, 2, 3]), ([1, -1, 3], [1]), ([7, 8, 1], [7]), ([], []), ([0, 7], [0, 7])],
)
def test_drafts_are_cut_to_what_can_be_verified(given, drafted):
    level1 = Level1([Careless(given)], SimpleNamespace(chooses=frozenset()), vocab_size=8)
    batch = SimpleNamespace(context=lambda proposal, row: np.array([1, 2], np.int32))
    proposal = Proposal.empty(1, greedy=True)
    matches = level1.find_matches(batch, proposal, [0])
    found = level1.draft_from_sources([("careless", 3)], matches, batch, proposal, [0], None, None)
    assert found.token_ids == [drafted]


class Model(Careless):
    """Says what it was called with."""

    name, needs_model = "model", True

    def draft(self, batch, proposal, rows, max_tokens, matches, sampling, noise):
        self.called = rows, sampling.all_greedy
        return Draft([[1] * count for count in max_tokens])


def test_each_source_has_the_sampling_of_its_own_rows():
    """A greedy request asks the model beside a sampled one that looks up: nothing is drawn."""
    model = Model([])
    level1 = Level1([model, Careless([2])], SimpleNamespace(chooses={"gamma"}), vocab_size=8)
    batch = SimpleNamespace(
        request_ids=["greedy", "sampled"],
        sampling=SamplingRows(torch.tensor([0.0, 1.0])),
        num_computed_tokens=[5, 5],
        context=lambda proposal, row: np.array([1, 2], np.int32),
    )
    noise = InnerNoise(0, torch.device("cpu"))
    before = noise._shared.get_state()
    speculator = SimpleNamespace(
        level1=level1, noise=noise, counters=LevelCounters(), controller=None
    )
    speculator._add_direct_draft = partial(TriForceSpeculator._add_direct_draft, speculator)
    proposal = Proposal.empty(2, greedy=False)
    choices = [Choice("model", 3, 0), Choice("careless", 2, 0)]
    matches = Matches({"model": [Match()] * 2, "careless": [Match()] * 2})
    TriForceSpeculator._propose_directly(speculator, batch, proposal, choices, matches)
    assert model.called == ([0], True)
    assert proposal.token_ids == [[1, 1, 1], [2]]
    assert proposal.probs == [[None] * 3, [None]]
    assert torch.equal(noise._shared.get_state(), before)


def test_a_class_of_confidence_is_one_that_there_is():
    traits = Careless.traits()
    assert [traits.confidence({"careless": n}) for n in (-3, 0, 9)] == [0, 0, 0]
    assert traits.confidence({}) is None


@pytest.mark.parametrize("prior_acceptance", [(), (0.5, 1.2), (-0.1,)])
def test_prior_acceptance_is_a_share(prior_acceptance):
    with pytest.raises(
        ValueError, match=r"draft source 'bad' has prior_acceptance=.*share from 0 to 1"
    ):
        SourceTraits("bad", prior_acceptance)
