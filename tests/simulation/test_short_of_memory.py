"""Promise: where the KV cache is short, speculation takes none of it from anybody: as many steps,
and preemptions, as stock vLLM."""

import random

import pytest

from tests.simulation.engine import Arrival, Engine
from tests.simulation.loads import MODES, served

ALWAYS = {"adaptive": False, "min_context": 0}


def serve(is_ours: bool, arrivals, **settings) -> Engine:
    """The engine that has served them; the number of its steps is that of ``seen``."""
    sizes = {"max_num_seqs": 64, "max_model_len": 1024, "max_num_batched_tokens": 2048}
    engine = served(is_ours, arrivals, **sizes | settings)
    assert len(engine.served) == len(arrivals) + is_ours  # check_empty() adds one
    return engine


def assert_no_more_steps(ours: Engine, stock: Engine) -> None:
    # check_empty() adds one.
    assert len(ours.seen) - 1 <= len(stock.seen) / 0.98


@MODES
@pytest.mark.parametrize("block_size, num_blocks", [(16, 60), (128, 9)])
def test_drafts_preempt_nobody(is_asynchronous, block_size, num_blocks):
    """Everybody drafts at every step, nothing is accepted: the schedule is stock vLLM's."""
    draw = random.Random(block_size)
    arrivals = [Arrival(0.002 * n, draw.randint(1, 200), draw.randint(1, 300)) for n in range(40)]
    settings = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "is_asynchronous": is_asynchronous,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "prefix_caching": draw.random() < 0.5,
    }
    stock = serve(False, arrivals, **settings)
    ours = serve(True, arrivals, **settings, **ALWAYS)
    assert stock.num_preempted > 0
    assert sum(its.num_drafts for its in ours.seen) > 0
    assert ours.num_preempted <= stock.num_preempted
    assert_no_more_steps(ours, stock)


@MODES
def test_a_cached_prompt_waits_for_no_room_for_drafts(is_asynchronous):
    """All of it but its last token is cached, and a step holds fewer tokens than a proposal."""
    arrivals = [Arrival(0.05 * n, 33, 20, prefix=1) for n in range(6)]
    settings = {
        "max_num_batched_tokens": 16,
        "max_model_len": 100,
        "num_blocks": 40,
        "prefix_caching": True,
        "is_asynchronous": is_asynchronous,
    }
    stock = serve(False, arrivals, **settings)
    ours = serve(True, arrivals, **settings, **ALWAYS, num_speculative_tokens=32)
    assert_no_more_steps(ours, stock)
