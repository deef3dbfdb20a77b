"""Promise: vLLM's own scheduler, with plans, asks of a worker what it can do, and nothing is left
of a request that is over.

``worker.py`` and ``engine.py`` check every step: as many placeholders as were planned, room for
their keys and values, slots, nobody planned for who cannot propose, and each request's tokens to
the last."""

import random

import pytest

from tests.simulation.engine import Arrival, Engine
from tests.simulation.loads import MODES, served
from tests.simulation.world import TEXTS


def mixed(seed: int, count: int, longest: int, rate: float = 20.0) -> list[Arrival]:
    """Requests of many kinds, that come and go."""
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        params: dict = {"temperature": draw.choice([0.0, 1.0])}
        if draw.random() < 0.2:
            params["seed"] = draw.randrange(100)
        if draw.random() < 0.1:
            params["allowed_token_ids"] = [7]
        stops = draw.randint(1, 80) if draw.random() < 0.3 else None
        aborted = draw.uniform(0.0, 0.6) if draw.random() < 0.2 else None
        prompt = draw.choice([1, 2, 31, 32, 33, draw.randint(1, longest), longest])
        tokens = draw.choice([1, 2, 3, 14, draw.randint(1, 150)])
        prefix = draw.randint(1, 3) if draw.random() < 0.4 else 0
        arrivals.append(Arrival(at, prompt, tokens, params, stops, aborted, prefix))
    return arrivals


def serve(arrivals, text="0.95, 0.7", seed=0, **settings) -> Engine:
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 512, "max_model_len": 1024}
    settings = {**sizes, "num_blocks": 400, "prefix_caching": True, **settings}
    return served(True, arrivals, TEXTS[text], "mha, uniform graphs", seed, **settings)


CHOOSING = {"max_speculating_seqs": 4}
ALWAYS = {"adaptive": False, "min_context": 40, "max_speculating_seqs": 4}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [400, 18], ids=["room", "preemption"])
@pytest.mark.parametrize("keys", [CHOOSING, ALWAYS], ids=["choosing", "always"])
@MODES
def test_requests_that_come_and_go(is_asynchronous, keys, num_blocks, seed):
    is_short = num_blocks < 100
    arrivals = mixed(seed, 60, longest=300, rate=500.0 if is_short else 20.0)
    if is_short:  # which begin together, and outgrow the cache
        arrivals += [Arrival(0.0, 40, 150) for _ in range(6)]
    settings = {"num_blocks": num_blocks, "max_num_seqs": 12 if is_short else 6}
    engine = serve(arrivals, seed=seed, is_asynchronous=is_asynchronous, **settings, **keys)
    assert sum(its.num_drafts for its in engine.seen) > 0
    num_aborted = sum(its.aborted_after is not None for its in arrivals)
    assert len(engine.served) >= len(arrivals) - num_aborted
    assert (engine.num_preempted > 0) == is_short


@MODES
def test_grammars(is_asynchronous):
    """Whose outputs are waited for, beside others."""
    from vllm.sampling_params import StructuredOutputsParams

    arrivals = mixed(5, 40, longest=200)
    for its in arrivals[::3]:
        its.params["structured_outputs"] = StructuredOutputsParams(regex="a*")
    engine = serve(arrivals, is_asynchronous=is_asynchronous, **ALWAYS)
    assert len(engine.served) >= sum(its.aborted_after is None for its in arrivals)


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_to_the_last_token(max_tokens):
    """Each length, alone, where everything is accepted and where nothing is."""
    for text in ("0.95, 0.7", "hopeless"):
        engine = serve([Arrival(0.0, 100, max_tokens)], text=text, **ALWAYS)
        assert engine.served["r0"].num_tokens == max_tokens


@pytest.mark.parametrize("prompt", range(1000, 1023))
def test_to_the_last_token_that_the_model_can_read(prompt):
    engine = serve([Arrival(0.0, prompt, 100), Arrival(0.0, prompt, 100)], **ALWAYS)
    counts = [engine.served[name].num_tokens for name in ("r0", "r1")]
    assert counts == [min(100, 1024 - prompt)] * 2
