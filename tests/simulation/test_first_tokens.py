"""Promise: beside requests that speculate, a prompt is read in as many steps as in stock vLLM, and
nothing is proposed that would delay a first token."""

import pytest

from tests.simulation.engine import Arrival, Engine, make_scheduler
from tests.simulation.loads import MODES, late_prompts
from tests.simulation.test_invariants import mixed
from tests.simulation.world import MACHINES, TEXTS, World
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.limits import sampling_seed
from vllm_triforce.core.messages import PLAN


@pytest.mark.parametrize("num_tokens, prompt", [(256, 1000), (2048, 2000)])
def test_a_late_prompt_is_read_in_as_many_steps_as_without_speculation(num_tokens, prompt):
    stock, ours = (
        [steps for steps, _ in late_prompts(is_ours, 32, num_tokens, prompt, repeats=2)]
        for is_ours in (False, True)
    )
    assert ours == stock


@MODES
def test_what_is_proposed_delays_no_first_token(is_asynchronous):
    """Nothing before a request's second token; beside prompts nothing through level 2, but for
    seeded requests, which must not depend on arrivals."""
    scheduler = make_scheduler(
        True,
        is_asynchronous,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        prefix_caching=True,
        num_blocks=3000,
    )
    engine = Engine(scheduler, World(MACHINES["mha"], TEXTS["0.95, 0.7"]))
    schedule, routes = scheduler.schedule, {True: set(), False: set()}

    def watched():
        step = schedule()
        requests = {name: scheduler.requests[name] for name in step.num_scheduled_tokens}
        reads = any(
            its.num_computed_tokens - step.num_scheduled_tokens[name] < its.num_prompt_tokens
            for name, its in requests.items()
        )
        for name, its in PLAN.of(step).proposing.items():
            request = requests[name]
            assert request.num_computed_tokens > request.num_prompt_tokens + 1
            if sampling_seed(request.sampling_params) is None:
                routes[reads].add(its.route)
        return step

    scheduler.schedule = watched
    long = [Arrival(0.0, 4000, 400, {"temperature": 0.0}) for _ in range(3)]
    engine.run(long + mixed(1, 40, longest=1500, rate=8.0))
    assert HIERARCHICAL in routes[False] and HIERARCHICAL not in routes[True]
