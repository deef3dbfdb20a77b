"""How requests come, and how fast they are served."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from tests.simulation.engine import Arrival, Engine, make_scheduler
from tests.simulation.world import HOPELESS, MACHINES, Machine, Text, World

MODES = pytest.mark.parametrize(
    "is_asynchronous", [True, False], ids=["asynchronous", "synchronous"]
)


def served(
    is_ours: bool, arrivals: Iterable[Arrival], text=HOPELESS, machine="mha", seed=0, **settings
) -> Engine:
    """Serve all, and check that nothing is kept of anybody."""
    world = World(MACHINES[machine], text, random.Random(seed))
    engine = Engine(make_scheduler(is_ours, **settings), world)
    engine.run([replace(its) for its in arrivals])
    engine.check_empty()
    return engine


@dataclass
class Closed:
    """So many requests all the time: whoever ends is followed by the next.

    What is counted are steps in which nobody reads a prompt.
    """

    size: int
    context: int
    tokens: int = 600
    """That each emits."""

    def engine(self, machine: Machine, text: Text, seed: int = 0, **settings) -> Engine:
        world = World(machine, text, random.Random(seed))
        longest = self.context + self.tokens + 64
        settings = {
            "is_ours": True,
            "max_num_batched_tokens": max(8192, longest),
            "max_model_len": 131_072,
            "block_size": 256 if longest > 20_000 else 64,
            **settings,
        }
        settings["num_blocks"] = 64 + self.size * -(-2 * longest // settings["block_size"])
        return Engine(make_scheduler(**settings), world)

    def serve(self, engine: Engine, num_steps: int, seed: int = 0) -> None:
        """So many steps of decoding more."""
        draw = random.Random(seed)
        end = self._num_decoding(engine) + num_steps

        def until() -> bool:
            missing = self.size - len(engine.scheduler.requests)
            for _ in range(missing):
                # Not all at once, at first.
                share = draw.uniform(0.2, 1.0) if not engine.served else 1.0
                tokens = max(1, int(share * self.tokens))
                engine.add(Arrival(engine.now, self.context, tokens, {"temperature": 1.0}))
            return self._num_decoding(engine) >= end

        until()
        engine.run([], until)

    @staticmethod
    def _num_decoding(engine: Engine) -> int:
        return sum(not seen.num_reading for seen in engine.seen)


def speedup(engine: Engine, skip: int = 0, to: int | None = None) -> float:
    """Tokens per second over those of plain decoding, in the steps behind the first ``skip`` in
    which nobody reads a prompt."""
    seen = [its for its in engine.seen if not its.num_reading][skip:to]
    tokens, seconds = sum(its.num_tokens for its in seen), sum(its.seconds for its in seen)
    plain = sum(its.plain for its in seen)
    return tokens / seconds / (sum(its.num_decoding for its in seen) / plain)


def poisson(
    rate: float, count: int, prompt: int, tokens: int, seed: int = 0, **params
) -> list[Arrival]:
    """As ``vllm bench serve --request-rate``: exponential times between requests."""
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        arrivals.append(Arrival(at, prompt, tokens, {"temperature": 1.0, **params}))
    return arrivals


def mean_per_token(engine: Engine, skip: int = 0) -> float:
    """Mean seconds between a request's tokens, of those behind the first that came."""
    several = [its for its in engine.served.values() if its.num_tokens > 1]
    served = sorted(several, key=lambda its: its.at)[skip:]
    return sum(its.per_token for its in served) / len(served)


@dataclass
class _Halves(Text):
    """Every second request has another text."""

    others: Text = field(default_factory=Text)

    def of(self, request: str) -> Text:
        return self.others if int(request[1:]) % 2 else self


def speeds_of_halves(
    machine: Machine, size: int, context: int, max_slowdown: float, others: Text = HOPELESS
) -> tuple[float, float]:
    """Speeds over plain decoding's, of requests that are predicted well and of the others.

    All begin together, and are watched until the first is done.
    """
    scheduler = make_scheduler(
        True,
        max_num_batched_tokens=size * (context + 16),
        num_blocks=200 + size * -(-2 * (context + 900) // 256),
        block_size=256,
        max_slowdown=max_slowdown,
    )
    text = _Halves(0.95, 0.6, match=0.4, lookup=0.4, others=others)
    engine = Engine(scheduler, World(machine, text, random.Random(3)))
    arrivals = [Arrival(0.0, context, 800, {"temperature": 1.0}) for _ in range(size)]
    engine.run(arrivals, until=lambda: bool(engine.served))
    plain_s = machine.full_pass([1] * size, [context + 300] * size) + machine.beside
    decoding_s = engine.now - max(engine.first.values())
    good, bad = ([engine.emitted[f"r{i}"] - 1 for i in range(half, size, 2)] for half in (0, 1))
    return tuple(plain_s * sum(its) / len(its) / decoding_s for its in (good, bad))


def late_prompts(
    is_ours: bool, num_running: int, budget: int, prompt: int, repeats: int = 4
) -> list[tuple[int, float]]:
    """Return steps and seconds to the first token of a prompt that comes beside predicted requests.

    Args:
        budget: tokens of a step, of which ``prompt`` is read.
    """
    found, text = [], Text(0.95, 0.8, match=0.9, lookup=0.8)
    for n in range(repeats):
        scheduler = make_scheduler(is_ours, max_num_batched_tokens=80_000)
        engine = Engine(scheduler, World(MACHINES["mha"], text, random.Random(n)))
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
