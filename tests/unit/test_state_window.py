"""Promise: an EAGLE-3 head reads each token with the state that belongs to it."""

import random

import numpy as np
import pytest
import torch

from vllm_triforce.cache.streaming import StateWindow
from vllm_triforce.runner_v1.sources.head import HiddenStates

RECENT, CAPACITY = 12, 24
MOST = 5  # tokens of a proposal


def state_of(number: int, position: int) -> list[float]:
    """Return the state of pass ``number`` at a position, of two numbers."""
    return [float(number), float(position)]


class Request:
    """A request whose states say by which pass they were made, and its head's cache."""

    def __init__(self) -> None:
        self.states = HiddenStates(lambda rows: rows, torch.float32, CAPACITY + MOST + 1, 2, 1)
        self.window = StateWindow(RECENT, CAPACITY)
        self.num_passes = self.num_tokens = 0
        self.newest: dict[int, int] = {}
        """By position, the pass whose state is the newest."""
        self.cache: list[tuple[int, tuple[float, ...]]] = []
        """Token and state of each place of the window."""

    def read(self, first: int, count: int) -> None:
        """Run a pass over ``count`` tokens."""
        self.num_passes += 1
        rows = torch.tensor([state_of(self.num_passes, first + i) for i in range(count)])
        self.states.hold(["a"])
        self.states.add(["a"], [first], [count], [rows[:, :1], rows[:, 1:]], [self.num_tokens])
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
    request.num_tokens = len(tokens)
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
    assert request.cache and computed == len(tokens)


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


def tensor_bytes(values) -> int:
    """Return the bytes of all tensors that an object keeps alive."""
    storages = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return sum(storages.values())


def test_states_are_kept_of_as_many_requests_as_may_speculate():
    """Prompts of 24 requests in chunks, then plain steps: two requests' fused states remain."""
    capacity, hidden, num_aux = 30, 64, 3
    states = HiddenStates(lambda rows: rows[:, :hidden], torch.float32, capacity, hidden, 2)
    names, length = [f"r{i}" for i in range(24)], 200
    # States that wait for their fusion, and indices.
    most = 4 * (2 * capacity * hidden + 64 * num_aux * hidden) + 8 * 64

    def step(first: int, count: int) -> None:
        aux = [torch.rand(len(names) * count, hidden) for _ in range(num_aux)]
        total = max(first + count, length)
        states.hold(names[:2])
        states.add(names, [first] * 24, [count] * 24, aux, [total] * 24)
        assert tensor_bytes(states) <= most

    for first in range(0, length, 50):
        step(first, 50)
    for position in range(length, length + 80):
        step(position, 1)
    assert [name for name in names if name in states] == names[:2]
    assert states.first_known("r1") == length + 80 - capacity


def test_a_request_takes_the_place_of_one_that_left():
    """Its states are those of its own passes, also where others wait to be fused."""
    states = HiddenStates(lambda rows: rows, torch.float32, 8, 1, 2)

    def step(names: str, first: int) -> None:
        aux = torch.tensor([[1000.0 * ord(name) + first] for name in names])
        states.add([*names], [first] * len(names), [1] * len(names), [aux])

    states.hold(["a", "b"])
    step("abc", 10)
    assert "c" not in states
    states.release("a")
    states.hold(["b", "c"])
    step("bc", 11)
    assert (states.first_known("b"), states.first_known("c")) == (10, 11)
    states.hold(["c", "d"])  # there is no room for b any more
    step("bcd", 12)
    assert "b" not in states and states.first_known("d") == 12
    assert states.take("c", 11, 13).tolist() == [[99_011.0], [99_012.0]]
    assert states.take("d", 12, 13).tolist() == [[100_012.0]]
