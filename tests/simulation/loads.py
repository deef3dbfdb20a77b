"""How requests come, and how fast they are served."""

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

from tests.simulation.engine import Arrival, Engine, make_scheduler
from tests.simulation.world import Machine, Text, World
from vllm_triforce.controller import PLAIN, Choice
from vllm_triforce.controller.measurements import BreakEven
from vllm_triforce.controller.routes import HIERARCHICAL


class FixedDecisions:
    """The same for every request and step: what a user could have set, known to pay or not."""

    def __init__(self, choice: Choice, num_rounds: int) -> None:
        self._its, self._num_rounds, self._num_steps = choice, num_rounds, 0
        self.controller = SimpleNamespace(
            start=lambda model: None, num_requests=0, break_even=BreakEven()
        )
        self._alive: set[str] = set()
        self._pending: dict = {}

    def decide(self, names, candidate, num_plain=0):
        self._num_steps += 1
        plan = {}
        if self._its is not PLAIN:
            for name in names:
                length = min(self._its.num_tokens, candidate(name).max_tokens)
                plan[name] = replace(self._its, num_tokens=length), self._num_rounds
        return self._num_steps - 1, plan

    ignores_steps = True

    def on_step_end(self, *step) -> None:
        """It learns nothing."""

    def release(self, request_id) -> None:
        """It knows nobody."""


FIXED = [
    *((Choice(HIERARCHICAL, n), r) for n, r in ((3, 2), (6, 3), (6, 2), (9, 4), (12, 5), (12, 4))),
    *((Choice("draft_model", n), -(-n // 2)) for n in (1, 2, 3, 4, 6, 8)),
]


@dataclass
class Closed:
    """So many requests all the time: whoever ends is followed by the next.

    What is counted are steps in which nobody reads a prompt.
    """

    size: int
    context: int
    tokens: int = 600
    """That each emits."""
    params: dict | None = None

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
        params = self.params if self.params is not None else {"temperature": 1.0}

        def until() -> bool:
            missing = self.size - len(engine.scheduler.requests)
            for _ in range(missing):
                # Not all at once, at first.
                share = draw.uniform(0.2, 1.0) if not engine.served else 1.0
                tokens = max(1, int(share * self.tokens))
                engine.add(Arrival(engine.now, self.context, tokens, dict(params)))
            return self._num_decoding(engine) >= end

        until()
        engine.run([], until)

    @staticmethod
    def _num_decoding(engine: Engine) -> int:
        return sum(not seen.step.num_reading for seen in engine.seen)


def speedup(engine: Engine, skip: int = 0, to: int | None = None) -> float:
    """Tokens per second over those of plain decoding, in the steps behind the first ``skip`` in
    which nobody reads a prompt."""
    seen = [its for its in engine.seen if not its.step.num_reading][skip:to]
    tokens, seconds = sum(its.num_tokens for its in seen), sum(its.seconds for its in seen)
    plain = sum(its.step.plain for its in seen)
    return tokens / seconds / (sum(its.step.num_decoding for its in seen) / plain)


def decide_by(engine: Engine, decisions) -> None:
    engine.scheduler.decisions = decisions


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
    served = sorted(engine.served.values(), key=lambda its: its.at)[skip:]
    return sum(its.per_token for its in served) / len(served)


@dataclass
class _Halves(Text):
    """Only tokens of every second request are accepted."""

    def rate(self, base: float, request: str, position: int, place: int) -> float:
        return base * (int(request[1:]) % 2 == 0)


def speeds_of_halves(
    machine: Machine, size: int, context: int, max_slowdown: float
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
    text = _Halves(0.95, 0.6, match=0.4, lookup=0.4)
    engine = Engine(scheduler, World(machine, text, random.Random(3)))
    arrivals = [Arrival(0.0, context, 800, {"temperature": 1.0}) for _ in range(size)]
    engine.run(arrivals, until=lambda: bool(engine.served))
    plain_s = machine.full_pass([1] * size, [context + 300] * size) + machine.beside
    decoding_s = engine.now - max(engine.first.values())
    good, bad = ([engine.emitted[f"r{i}"] - 1 for i in range(half, size, 2)] for half in (0, 1))
    return tuple(plain_s * sum(its) / len(its) / decoding_s for its in (good, bad))
