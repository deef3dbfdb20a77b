"""Promise: where rounds are made for a whole batch, a proposal is planned as long as its rounds are
likely to make it, and no longer than verifying its places is worth."""

from itertools import product

import pytest

from vllm_triforce.controller.round_lengths import _reached, lengthened


def chances(num_rounds: int, rate: float, gamma: int) -> list[float]:
    """Of at least 0, 1, 2 ... tokens, by going through everything that rounds can give."""
    of_one = {n + 1: rate**n * (1 - rate) for n in range(gamma)} | {gamma + 1: rate**gamma}
    found = [0.0] * (num_rounds * (gamma + 1) + 1)
    for rounds in product(of_one.items(), repeat=num_rounds):
        chance = 1.0
        for _, each in rounds:
            chance *= each
        for n in range(sum(tokens for tokens, _ in rounds) + 1):
            found[n] += chance
    return found


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("num_rounds", "gamma"), [(1, 1), (3, 2), (2, 4)])
def test_what_rounds_may_give(rate, num_rounds, gamma):
    per_round = sum(rate**n for n in range(gamma + 1))
    found = _reached(num_rounds, round(20 * per_round), gamma)
    assert found == pytest.approx(chances(num_rounds, rate, gamma), abs=0.05)


def test_a_place_is_planned_as_long_as_it_is_worth_it():
    """Three rounds of two tokens on average: six are planned at first, nine may come."""
    usual = dict(most=12, num_rounds=3, round_tokens=2.0, gamma=2)
    assert lengthened(6, **usual, acceptance=0.95, worth=1e6) == 9
    assert lengthened(6, **usual, acceptance=0.95, worth=0.0) == 6
    assert lengthened(6, **usual, acceptance=0.0, worth=1e6) == 6
    some = lengthened(6, **usual, acceptance=0.9, worth=20.0)
    likely = chances(3, 0.618, 2)
    assert 6 < some < 9
    assert likely[some] * 0.9**some * 20 >= 1 > likely[some + 1] * 0.9 ** (some + 1) * 20
    assert lengthened(6, **(usual | {"most": 7}), acceptance=0.95, worth=1e6) == 7
    assert lengthened(12, **usual, acceptance=0.95, worth=1e6) == 12, "nothing is taken away"
