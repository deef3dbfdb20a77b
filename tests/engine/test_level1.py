"""Promise: level 1's window is sink plus recent tokens, and survives anything that happens."""

import numpy as np
import pytest
import torch

from tests.conftest import triforce
from tests.generation import generate
from vllm_triforce.cache.streaming import StreamingCache, StreamingWindow
from vllm_triforce.metrics.report import counters_of

SINK, RECENT, CAPACITY = 4, 10, 20


def simulate(steps) -> list[int]:
    """Feeds a window as a draft would; returns what its cache holds, by position."""
    window = StreamingWindow(SINK, RECENT, CAPACITY)
    cache: list[int] = []
    for token_ids, drafts in steps:
        position, fed = window.advance(np.asarray(token_ids, np.int32), len(drafts))
        assert len(fed) >= 1 and fed[-1] == token_ids[-1]
        assert position <= len(cache)
        cache = cache[:position] + fed.tolist()
        for token in drafts[:-1]:
            assert window.append(token) == len(cache)
            cache.append(token)
        assert len(cache) <= CAPACITY
        kept = len(cache) - max(len(drafts) - 1, 0)
        # Sinks first, then an unbroken run of the newest tokens, of useful length.
        recent = cache[min(SINK, len(token_ids)) : kept]
        assert cache[: min(SINK, kept)] == list(token_ids[: min(SINK, kept)])
        assert list(token_ids[len(token_ids) - len(recent) :]) == recent
        assert len(recent) >= min(RECENT, len(token_ids) - SINK)
    return cache


def test_window_slides_and_is_rebuilt():
    tokens = list(range(100, 200))
    cache = simulate([(tokens[:n], [7, 8]) for n in range(1, 101, 3)])
    assert cache[:SINK] == tokens[:SINK] and cache[-2:] == [tokens[-1], 7]


def test_rejected_drafts_are_forgotten():
    tokens = list(range(100, 112))
    cache = simulate([(tokens, [1, 2, 3]), ([*tokens, 1, 9], [4, 5])])
    assert cache == [*tokens, 1, 9, 4]


def test_window_of_another_request_is_replaced():
    """A slot handed on without notice: token ids are compared, not counts."""
    simulate([(list(range(50)), [1]), (list(range(500, 530)), [1]), (list(range(3)), [1])])


def test_slots_are_reused_and_never_shared():
    cache = StreamingCache(70, 32, 3, torch.device("cpu"))
    assert cache.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    slots = {name: cache.slot(name) for name in "abc"}
    assert sorted(slots.values()) == [0, 1, 2]
    cache.release("b")
    assert cache.slot("d") == slots["b"] and cache.num_free_slots == 0
    cache.release("never seen")
    for name in "acd":
        cache.release(name)
    assert cache.num_free_slots == 3


@pytest.mark.engine
def test_draft_is_not_bound_by_its_position_limit(engines, pair, text):
    """A draft of 2,048 positions on a 4,000-token context still drafts what level 2 accepts."""
    llm = engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=1024))
    before = counters_of(llm)
    generate(llm, [text[:4000]], max_tokens=120)
    counted = counters_of(llm).since(before)
    assert counted.num_level1_drafted > 30
    assert counted.level1_acceptance_rate > 0.1
