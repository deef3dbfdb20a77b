"""Promise: no proposal of a source has more tokens than there are slots for, or an invalid one."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_triforce.controller.routes import SourceTraits
from vllm_triforce.runner_v1.batch import Proposal
from vllm_triforce.runner_v1.levels import Level1
from vllm_triforce.runner_v1.sources.prompt_lookup import PromptLookup
from vllm_triforce.runner_v1.sources.source import Match, TokenSource


class Careless(TokenSource):
    """Source that returns its given tokens, however many are wanted."""

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
def test_drafts_are_cut_to_verifiable_tokens(given, drafted):
    controller = SimpleNamespace(chooses_source=False, choose_draft=lambda *_: ("careless", 3))
    level1 = Level1([Careless(given)], controller, vocab_size=8)
    batch = SimpleNamespace(
        request_ids=["a"],
        has_seed=lambda row: False,
        context=lambda proposal, row: np.array([1, 2], np.int32),
    )
    found = level1.draft(batch, Proposal.empty(1), [0], [3], None, None)
    assert found.token_ids == [drafted]


def test_a_match_class_is_one_that_there_is():
    traits = Careless.traits()
    assert [traits.match_class({"careless": n}) for n in (-3, 0, 9)] == [0, 0, 0]
    assert traits.match_class({}) is None


@pytest.mark.parametrize("prior_acceptance", [(), (0.5, 1.2), (-0.1,)])
def test_prior_acceptance_is_a_share(prior_acceptance):
    with pytest.raises(
        ValueError, match=r"draft source 'bad' has prior_acceptance=.*share from 0 to 1"
    ):
        SourceTraits("bad", prior_acceptance)


def on_host(token_ids: np.ndarray, max_ngram: int, count: int) -> list[int]:
    lookup = PromptLookup(max_ngram)
    match = lookup.find(token_ids)
    return [] if match is None else lookup.continue_from(token_ids, match, count)
