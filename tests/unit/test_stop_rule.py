"""Promise: a draft ends where its next token would make the batch slower, and not before."""

import itertools

import pytest

from tests.unit.worlds import DRAFT, LONG_PAYS, controller, matched
from vllm_triforce.controller import Candidate, Choice
from vllm_triforce.controller.controller import Planned
from vllm_triforce.controller.draft_lengths import ConfidenceRates, StopRule
from vllm_triforce.controller.routes import HIERARCHICAL

# Confidences of the classes in ``rule()``, and the acceptance of each.
LOW, MIDDLE, HIGH = 0.05, 0.4, 0.99
RATES = [0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.95]


def rule(num_rows=1, num_reqs=1, mean=0.5, pass_s=1.0, token_s=2.0) -> StopRule:
    verify_s = [[token_s * n for n in range(9)]] * num_rows
    return StopRule(DRAFT, 20.0, pass_s, verify_s, num_reqs, [RATES] * num_rows, [mean] * num_rows)


def speed(top_probs: tuple[float, ...], num_passes: int) -> float:
    """Tokens a second of a draft with tokens of these top_probs, by hand."""
    chances = {LOW: 0.1, MIDDLE: 0.5, HIGH: 0.95}
    tokens, chance = 1.0, 1.0
    for top_prob in top_probs:
        chance *= chances[top_prob]
        tokens += chance
    return tokens / (20.0 + 2.0 * len(top_probs) + num_passes)


@pytest.mark.parametrize("top_probs", itertools.product((LOW, MIDDLE, HIGH), repeat=4))
def test_a_token_is_kept_where_that_is_faster(top_probs):
    found = rule()
    for place, top_prob in enumerate(top_probs):
        kept = top_probs[:place]
        is_faster = speed((*kept, top_prob), place + 1) > speed(kept, place + 1)
        assert found.keeps(0, top_prob) == is_faster
        if not is_faster:
            break
    assert len(found.classes[0]) in (place, place + 1)


def test_a_pass_is_made_where_the_mean_token_pays_for_it():
    found = rule(mean=0.5)
    ends = []
    for _ in range(8):
        ends.append(found.goes_on(0))
        found.keeps(0, HIGH)
    # Each token multiplies the chance by 0.95, and the tokens so far make seconds dearer.
    assert ends[0] and not ends[-1] and ends == sorted(ends, reverse=True)
    assert not rule(mean=0.1).goes_on(0) and rule(mean=0.9).goes_on(0)


def test_everybody_waits_for_a_draft():
    """The gain of one request is one request's, the time everybody's."""
    assert rule(num_reqs=1).goes_on(0) and not rule(num_reqs=8).goes_on(0)


def test_rows_are_apart_and_seeded_ones_are_not_ended():
    found = rule(num_rows=2, token_s=3.0)
    found.rates[1] = None
    assert not found.keeps(0, LOW) and found.keeps(1, LOW) and found.goes_on(1)
    assert found.classes == [[], []]


def test_acceptance_by_class_is_learned_up_to_the_rejection():
    rates = ConfidenceRates(is_greedy=False)
    before = rates.values()
    for _ in range(40):
        rates.add_draft([7, 2, 0], num_accepted=1)
    after = rates.values()
    assert after[7] > before[7] and after[2] < 0.3 and after[0] == before[0]
    assert before == sorted(before), "a likelier token is accepted more often"


@pytest.fixture
def chosen():
    """A controller with a request, and the rule for its direct draft."""
    found = controller(LONG_PAYS)
    candidate = Candidate("a", 2000, 8, match_classes=matched(2), is_greedy=False)
    found.acceptance.of("a", is_greedy=False)
    return found, candidate


def test_only_the_first_token_of_an_ended_draft_says_how_good_the_source_is(chosen):
    found, candidate = chosen
    for _ in range(30):
        found.choose([candidate])
        ended = found.rule_for_direct_draft(DRAFT, [candidate], 0)
        for top_prob in (0.4, 0.99, 0.99):
            ended.classes[0].append(3 if top_prob < 0.5 else 7)
        found.on_draft_end([candidate], [2], ended, num_passes=3)
        found.observe_full_pass("a", 3, 0, Choice(DRAFT, 2, match_class=0))
    rates = found.acceptance.sampled
    assert rates.of(DRAFT, False, 0).value < 0.1
    (classes,) = found.rule_for_direct_draft(DRAFT, [candidate], 0).rates
    assert classes[3] < 0.2 and classes[7] > 0.9, "tokens behind a rejected one are not tested"


def test_the_plan_is_corrected_by_what_was_drafted(chosen):
    found, candidate = chosen
    found.choose([candidate])
    for planned, drafted in ((2, 5), (4, 1), (3, 3)):
        found.planned = Planned(0, 0.0)
        ended = found.rule_for_direct_draft(DRAFT, [candidate], 0)
        ended.classes[0] += [7] * drafted
        found.on_draft_end([candidate], [planned], ended, num_passes=drafted)
        tokens, seconds = found.planned
        assert tokens == drafted - planned
        full_s = [found.model.full_pass([n + 1], [2000]) for n in (planned, drafted)]
        wanted = full_s[1] - full_s[0] + tokens * found.model.draft(1)
        assert seconds == pytest.approx(wanted, abs=1e-9)


def test_drafts_that_end_before_their_first_token_count(chosen):
    found, candidate = chosen
    for _ in range(10):
        found.choose([candidate])
        found._chosen["a"] = Choice(DRAFT, 2, match_class=0)
        ended = found.rule_for_direct_draft(DRAFT, [candidate], 0)
        found.on_draft_end([candidate], [2], ended, num_passes=1)
    assert found.acceptance.sampled.of(DRAFT, False, 0).value < 0.3


def test_the_classes_of_a_draft_are_not_another_routes(chosen):
    """A draft that is cut to nothing is never tested, and another route may propose next."""
    found, candidate = chosen
    found.choose([candidate])
    ended = found.rule_for_direct_draft(DRAFT, [candidate], 0)
    ended.classes[0] += [7, 7]
    found.on_draft_end([candidate], [2], ended, num_passes=2)
    assert found.stop_rules.observe_direct("a", HIERARCHICAL, 5, 5) == 5


def test_a_class_that_is_never_drafted_returns_to_its_prior():
    rates = ConfidenceRates(is_greedy=False)
    prior = rates.values()[0]
    for _ in range(60):
        rates.add_draft([0], num_accepted=0)
    low = rates.values()[0]
    for _ in range(6000):
        rates.add_draft([7], num_accepted=1)
    assert low < 0.2 * prior and rates.values()[0] > 0.7 * prior
