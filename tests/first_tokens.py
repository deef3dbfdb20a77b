"""What a prompt that comes late waits for beside requests that speculate, against stock vLLM.

python -m tests.first_tokens [v1] [v2] [schedule] [256] [2048] [8192]

``v1``: the embedded pair; every request repeats itself, so that prompt lookup predicts it. ``v2``:
vLLM's schedulers over a device of computed times (``tests/simulation``), in its seconds.
``schedule``: milliseconds of ``schedule()`` while a prompt of 96,000 cached tokens waits for KV
blocks, and of the scheduler in a step of Runner V2 in which nothing is proposed.
"""

import os
import sys
import time
from random import Random
from statistics import mean, median

os.environ.setdefault("VLLM_TRIFORCE_CHECK", "")  # as a server has it, not as tests have it

from vllm import SamplingParams

from tests.conftest import Engines
from tests.models import PAIR
from tests.simulation.engine import Arrival, Engine, make_scheduler
from tests.simulation.world import MACHINES, Text, World

# Tokens of a step, and of the late prompt: read in several steps, or just in one.
STEPS = {256: 1000, 2048: 2000, 8192: 8100}
TURNS = 4  # of stock vLLM and TriForce, one after the other
UNPREDICTED = Text(0.3, 0.1, match=0.1, lookup=0.1)
PREDICTED = Text(0.95, 0.8, match=0.9, lookup=0.8)


def in_engine(
    llm, num_running: int, prompt: int, repeats: int, seed: int = 0, num_emitted: int = 400
) -> list[tuple[int, float]]:
    """Return steps and seconds to the first token of each late prompt, one after another.

    A late prompt comes when the running requests have emitted the same number of tokens with
    speculation as without: a step's attention takes as long as their contexts are.

    Args:
        seed: of the prompts; a prompt that is read twice is in the prefix cache.
        num_emitted: tokens of each running request before the first late prompt, on average.
    """
    engine, draw = llm.llm_engine, Random(f"{prompt} {num_running} {seed}")
    params = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)

    def add(name: str, tokens: list[int], params) -> None:
        engine.add_request(name, {"prompt_token_ids": tokens}, params)

    def step() -> list[str]:
        outputs = engine.step()
        emitted.update({its.request_id: len(its.outputs[0].token_ids) for its in outputs})
        return [its.request_id for its in outputs]

    running = [f"running {n}" for n in range(num_running)]
    emitted = dict.fromkeys(running, 0)
    for name in running:
        add(name, [draw.randrange(3, 200) for _ in range(16)] * 8, params)
    found = []
    for n in range(repeats):
        while sum(emitted[name] for name in running) < (num_emitted + 80 * n) * num_running:
            step()
        late = f"late {n}"
        once = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        add(late, [draw.randrange(3, 200) for _ in range(prompt)], once)
        start, num_steps = time.perf_counter(), 1
        while late not in step():
            num_steps += 1
        found.append((num_steps, time.perf_counter() - start))
    engine.abort_request(running)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def in_simulation(is_ours: bool, num_running: int, budget: int, prompt: int, repeats: int = 4):
    """Return steps and seconds to the first token of each late prompt."""
    found = []
    for n in range(repeats):
        scheduler = make_scheduler(is_ours, max_num_batched_tokens=80_000)
        engine = Engine(scheduler, World(MACHINES["mha"], PREDICTED, Random(n)))
        for _ in range(num_running):
            engine.add(Arrival(0.0, 2000, 6000, {"temperature": 0.0}))
        # As long contexts with speculation as without.
        engine.run([], lambda e=engine: sum(e.emitted.values()) >= 400 * num_running)
        scheduler.max_num_scheduled_tokens = budget
        before, late = len(engine.seen), f"r{num_running}"
        # Somewhere in a step, whose end it waits for.
        arrival = Arrival(engine.now + n / repeats * engine.seen[-1].seconds, prompt, 2)
        engine.run([arrival], lambda e=engine, late=late: late in e.first)
        found.append((len(engine.seen) - before, engine.first[late] - arrival.at))
    return found


def times_of_schedule(is_ours: bool, num_steps: int = 30) -> float:
    """Return the median seconds of ``schedule()`` while a long, cached prompt waits for blocks."""
    scheduler = make_scheduler(
        is_ours,
        prefix_caching=True,
        num_blocks=3300,
        max_num_batched_tokens=100_000,
        **({"adaptive": False, "min_context": 0} if is_ours else {}),
    )
    engine = Engine(scheduler, World(MACHINES["mha"], PREDICTED, Random(1)))
    engine.run([Arrival(0.0, 96_000, 1, prefix=1)])
    for _ in range(4):
        engine.add(Arrival(engine.now, 4_000, 3000, {"temperature": 0.0}))
    after = len(engine.seen) + 20
    engine.run([], lambda: len(engine.seen) >= after)
    engine.add(Arrival(engine.now, 96_000, 1, prefix=1))  # its prefix's tail was overwritten
    seconds = _time_calls(scheduler, "schedule")
    engine.run([], lambda: len(seconds) >= num_steps)
    assert len(scheduler.waiting) == 1, "it should wait"
    return median(seconds)


def times_of_plain_steps(is_ours: bool, num_reqs: int, num_steps: int = 600) -> float:
    """Return the median seconds of the scheduler in a step of requests that decode plainly."""
    scheduler = make_scheduler(is_ours)
    engine = Engine(scheduler, World(MACHINES["mha"], UNPREDICTED, Random(1)))
    for _ in range(num_reqs):
        engine.add(Arrival(0.0, 4_000, 6000, {"temperature": 0.0}))
    engine.run([], lambda: len(engine.seen) >= 400)
    parts = [_time_calls(scheduler, name) for name in ("schedule", "update_from_output")]
    engine.run([], lambda: len(parts[1]) >= num_steps)
    return sum(map(median, parts))


def _time_calls(scheduler, name: str) -> list[float]:
    """Return a list to which each further call of a method adds its seconds."""
    seconds: list[float] = []
    method = getattr(scheduler, name)

    def timed(*args):
        start = time.perf_counter()
        try:
            return method(*args)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(scheduler, name, timed)
    return seconds


def _print(runner: str, size: int, budget: int, prompt: int, stock, ours) -> None:
    columns = []
    for found in (stock, ours):
        steps, seconds = zip(*found)
        columns += [mean(steps), 1e3 * median(seconds)]
    print(
        f"{runner:3} {size:3} beside, {budget:5} tokens a step, prompt of {prompt:5}: "
        f"steps {columns[0]:5.2f} {columns[2]:5.2f} ({columns[2] / columns[0]:4.2f}), "
        f"ms {columns[1]:7.1f} {columns[3]:7.1f} ({columns[3] / columns[1]:4.2f})",
        flush=True,
    )


def main() -> None:
    asked = sys.argv[1:] or ["v1", "v2", "schedule"]
    budgets = {int(its): STEPS[int(its)] for its in asked if its.isdecimal()} or STEPS
    print("stock vLLM, TriForce and the ratio")
    for runner in ("v1", "v2"):
        for budget, prompt in budgets.items() if runner in asked else ():
            engines = Engines()
            for size in (8, 32):
                found: list[list] = [[], []]
                for turn in range(TURNS if runner == "v1" else 1):
                    for is_ours in (False, True) if turn % 2 == 0 else (True, False):
                        if runner == "v1":
                            keys = {"method": "triforce"} if is_ours else None
                            settings = {"max_num_batched_tokens": budget, "max_num_seqs": 40}
                            llm = engines.get(str(PAIR / "target"), keys, **settings)
                            found[is_ours] += in_engine(llm, size, prompt, 6, turn)
                        else:
                            found[is_ours] += in_simulation(is_ours, size, budget, prompt)
                _print(runner, size, budget, prompt, *found)
            engines.clear()
    if "schedule" in asked:
        stock, ours = times_of_schedule(False), times_of_schedule(True)
        print(f"schedule(): ms {1e3 * stock:.2f} {1e3 * ours:.2f} ({ours / stock:.2f})")
        for size in (1, 8, 32):
            stock, ours = (1e6 * times_of_plain_steps(is_ours, size) for is_ours in (False, True))
            print(f"a plain step of {size}: microseconds {stock:.0f} {ours:.0f}")


if __name__ == "__main__":
    main()
