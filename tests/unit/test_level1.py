"""Promise: whatever a source of drafts says, no proposal has more tokens than there are slots for,
and none that is no token."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_triforce.controller.source_traits import SourceTraits
from vllm_triforce.host.draft_batch import Proposal
from vllm_triforce.host.level1 import Level1
from vllm_triforce.host.sources.source import Offer, TokenSource


class Careless(TokenSource):
    """Gives what it was told to give, whatever was asked."""

    name = "careless"
    hopes = (0.5,)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def find(self, token_ids):
        return Offer(9)

    def follow(self, token_ids, offer, count):
        return self._tokens


@pytest.mark.parametrize(
    "given, drafted",
    [
        ([1, 2, 3, 4, 5], [1, 2, 3]),
        ([1, -1, 3], [1]),
        ([7, 8, 1], [7]),
        ([], []),
        ([0, 7], [0, 7]),
    ],
)
def test_drafts_are_cut_to_what_can_be_verified(given, drafted):
    level1 = Level1([Careless(given)], SimpleNamespace(chooses=frozenset()), vocab_size=8)
    batch = SimpleNamespace(context=lambda proposal, row: np.array([1, 2], np.int32))
    proposal = Proposal.empty(1, greedy=True)
    offers = level1.offers(batch, proposal, [0])
    found = level1.draft_from([("careless", 3)], offers, batch, proposal, [0], None, None)
    assert found.token_ids == [drafted]


def test_a_class_of_confidence_is_one_that_there_is():
    traits = Careless.traits()
    assert [traits.confidence({"careless": n}) for n in (-3, 0, 9)] == [0, 0, 0]
    assert traits.confidence({}) is None


@pytest.mark.parametrize("hopes", [(), (0.5, 1.2), (-0.1,)])
def test_hopes_are_shares(hopes):
    with pytest.raises(ValueError, match=r"draft source 'bad' has hopes=.*share from 0 to 1"):
        SourceTraits("bad", hopes)
