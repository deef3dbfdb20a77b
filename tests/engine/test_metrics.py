"""Promise: the figures of a running engine add up."""

import pytest

from tests.conftest import triforce
from tests.generation import generate
from vllm_triforce.metrics.report import counters_of, summary


@pytest.mark.engine
def test_counters_of_an_engine_add_up(engines, pair, text):
    llm = engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=1024))
    before = counters_of(llm)
    tokens = generate(llm, [text[:900]], max_tokens=60)[0]
    counted = counters_of(llm).since(before)
    # Every token is the first one, an accepted draft, or a full pass's own.
    plain = 60 - 1 - counted.num_level2_accepted - counted.num_level3_steps
    assert len(tokens) == 60 and 0 <= plain <= 2
    assert counted.num_level2_drafted <= counted.num_proposed <= 6 * counted.num_proposals
    assert counted.num_level1_accepted + counted.num_inner_rounds == counted.num_proposed
    assert set(counted.time_seconds) == {"selection", "level 1", "level 2", "verification"}
    assert all(seconds > 0 for seconds in counted.time_seconds.values())
    assert "Mean acceptance length" in summary(counted)


@pytest.mark.engine
def test_an_engine_without_triforce_says_so(engines, pair):
    with pytest.raises(ValueError, match="no TriForce counters"):
        counters_of(engines.get(pair["target"]))
