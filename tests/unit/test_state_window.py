"""Promise: an EAGLE-3 head reads each token with the state that belongs to it."""

import random

import numpy as np
import pytest
import torch

from vllm_triforce.cache.streaming import StateWindow
from vllm_triforce.runner_v1.hidden_states import HiddenStates

RECENT, CAPACITY = 12, 24
MOST = 5  # tokens of a proposal


def state_of(number: int, position: int) -> list[float]:
    """Return the state of pass ``number`` at a position, of two numbers."""
    return [float(number), float(position)]


class Request:
    """A request whose states say by which pass they were made, and its head's cache."""

    def __init__(self) -> None:
        self.states = HiddenStates(lambda rows: rows, torch.float32, CAPACITY + MOST + 1)
        self.window = StateWindow(RECENT, CAPACITY)
        self.num_passes = 0
        self.newest: dict[int, int] = {}
        """By position, the pass whose state is the newest."""
        self.cache: list[tuple[int, tuple[float, ...]]] = []
        """Token and state of each place of the window."""

    def read(self, first: int, count: int) -> None:
        """Run a pass over ``count`` tokens."""
        self.num_passes += 1
        rows = torch.tensor([state_of(self.num_passes, first + i) for i in range(count)])
        self.states.add(["a"], [first], [count], [rows[:, :1], rows[:, 1:]])
        self.newest |= dict.fromkeys(range(first, first + count), self.num_passes)

    def draft(self, tokens: np.ndarray, num_computed: int, num_drafts: int) -> int:
        """Draft after ``tokens``, check what the head has read, and return the tokens fed."""
        known = self.states.first_known("a")
        position, first = self.window.advance_to(tokens, num_drafts, num_computed, known)
        states = self.states.take("a", first - 1, len(tokens) - 1).tolist()
        del self.cache[position:]
        self.cache += [(int(t), tuple(s)) for t, s in zip(tokens[first:], states)]
        for j in range(num_drafts - 1):  # the head's own output is none of these states
            place = self.window.append(1000 + j)
            assert place == len(self.cache) < CAPACITY
            self.cache.append((1000 + j, (-1.0, -1.0)))
        self.check(tokens, known, num_drafts - 1)
        return len(tokens) - first

    def check(self, tokens, first_known: int, num_drafted: int) -> None:
        """Each place but those of drafts has a token and the newest state before it."""
        read = self.cache[: len(self.cache) - num_drafted]
        places = range(len(tokens) - len(read), len(tokens))
        assert places[0] > first_known and len(read) >= min(
            RECENT - MOST, len(tokens) - 1 - first_known
        )
        expected = [(int(tokens[p]), tuple(state_of(self.newest[p - 1], p - 1))) for p in places]
        assert read == expected


@pytest.mark.parametrize("seed", range(30))
def test_each_token_is_read_with_its_newest_state(seed):
    draw = random.Random(seed)
    request = Request()
    tokens = [draw.randrange(3) for _ in range(draw.randrange(2, 120))]
    hit = draw.choice([0, draw.randrange(len(tokens))])  # tokens of the prefix cache
    computed = hit
    while computed < len(tokens):
        count = min(len(tokens) - computed, draw.randrange(1, 60))
        request.read(computed, count)
        computed += count
    for _ in range(25):
        tokens.append(draw.randrange(3))
        if draw.random() < 0.3:  # a plain step
            request.read(computed, 1)
            computed += 1
            continue
        proposal: list[int] = []
        for _ in range(draw.randrange(1, 3)):  # rounds
            num_drafts = draw.randrange(1, 3)
            request.draft(np.array(tokens + proposal), computed, num_drafts)
            accepted = draw.randrange(num_drafts + 1)
            request.read(computed + len(proposal), num_drafts + 1)  # level 2
            proposal += [draw.randrange(3) for _ in range(accepted + 1)]
        request.read(computed, len(proposal) + 1)  # the full pass
        accepted = draw.randrange(len(proposal) + 1)
        tokens += proposal[:accepted]
        computed += accepted + 1


def test_few_entries_are_fed_again():
    """Of a confirmed window only what a proposal left behind is fed."""
    request = Request()
    request.read(0, 30)
    tokens = list(range(31))
    assert request.draft(np.array(tokens), 30, 2) == RECENT
    request.read(30, 3)  # level 2: the newest token and two drafts, both accepted
    proposal = [101, 102, 103]
    assert request.draft(np.array(tokens + proposal), 30, 2) == 3
    request.read(30, 4)  # the full pass accepts two
    tokens += [*proposal[:2], 200]
    assert request.draft(np.array(tokens), 33, 2) == 3


def test_a_request_of_the_same_id_starts_anew():
    request = Request()
    request.read(0, 30)
    request.states.release("a")
    request.newest.clear()
    request.read(8, 10)  # behind a prefix hit
    assert request.states.first_known("a") == 8
    request.states.keep({"b"})
    assert not len(request.states)
