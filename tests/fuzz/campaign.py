"""Run random streams through random engines, both drawn by hypothesis."""

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings

from tests.fuzz.judge import Fault, Judge, Running
from tests.fuzz.replay import script
from tests.fuzz.settings import settings as settings_strategy
from tests.fuzz.streams import streams as streams_strategy

STREAMS_PER_ENGINE = 25
# A pretrained model's streams take as long as many of the others.
OF_SMOLLM2 = 5
SHRINK_SECONDS = 60
# Of a right distribution once in a hundred thousand runs; looked at after every engine.
LEAST_P_VALUE = 1e-5


@dataclass
class Found:
    """A kind of fault: how it first showed, and how often."""

    fault: Fault
    first_stream: int
    after_s: float
    script: str
    times: int = 1


class Campaign:
    """Fuzz until a deadline or a number of engines.

    Args:
        runner: "v1" or "v2"; for v2 this process must have been started for it.
        shrink_seconds: for each kind of fault; 0 keeps what was found as it is.
        is_control: stock vLLM in TriForce's place, which must show no fault.
        model: for all engines; None draws one for each.
        connectors: whether half of the engines have a KV connector.
    """

    def __init__(
        self,
        runner: str,
        number: int,
        shrink_seconds: float = SHRINK_SECONDS,
        is_control: bool = False,
        log=sys.stderr.write,
        model: str | None = None,
        connectors: bool = False,
    ) -> None:
        self._drawn_settings = settings_strategy(runner, model, connectors)
        self.runner, self.number, self._is_control = runner, number, is_control
        self.judge = Judge()
        self.found: dict[str, Found] = {}
        self.engines: list[dict] = []
        self.refused: list[str] = []
        self._shrink_seconds, self._log = shrink_seconds, log
        self._begun = time.monotonic()
        self._checked_s = 0.0

    def run(self, seconds: float, per_engine: int = STREAMS_PER_ENGINE, most: int = 10**6) -> None:
        """Fuzz; the time includes shrinking."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self.engines) < most:
            for chosen in self._drawn(self._drawn_settings, 8):
                if time.monotonic() > deadline or len(self.engines) >= most:
                    break
                if self._is_control:
                    # Stock's own Runner V1 mixes requests' thinking budgets up (patches/README.md).
                    engine = {k: v for k, v in chosen["engine"].items() if k != "reasoning"}
                    chosen = chosen | {"triforce": None, "engine": engine}
                self._one_engine(chosen, deadline, per_engine)

    def _one_engine(self, chosen: dict, deadline: float, per_engine: int) -> None:
        self.engines.append(chosen)
        running = self._start(chosen)
        if running is None:
            return
        acceptance = running.acceptance
        if chosen["model"] == "smollm2":
            per_engine = max(1, per_engine // OF_SMOLLM2)
        for stream in self._drawn(streams_strategy(chosen, self.runner), per_engine):
            if self.judge.counts["driven"] and time.monotonic() > deadline:
                break
            if running is None:
                running = self._start(chosen)
                if running is None:
                    break
                running.acceptance = acceptance
            stream_seed = self.number * 1_000_000 + self.judge.counts["driven"]
            self.judge.counts["driven"] += 1
            begun = time.monotonic()
            faults = self.judge.check(running, stream, stream_seed)
            self._checked_s += time.monotonic() - begun
            is_new = any(fault.kind not in self.found for fault in faults)
            if any(fault.ends_engine for fault in faults) or (is_new and self._shrink_seconds):
                # Shrinking starts engines, and ending those takes the process groups from others.
                running.end()
                running = None
            for fault in {fault.kind: fault for fault in faults[::-1]}.values():
                self._keep(chosen, stream, stream_seed, fault)
        if running is not None:
            running.end()
        if what := acceptance.fault():
            self._keep(chosen, acceptance.worst[1], 0, Fault("acceptance", what))
        self._log(f"acceptance: {acceptance.text()}\n")
        for name, pool in self.judge.distribution.pools.items():
            if pool.p_value() < LEAST_P_VALUE:
                fault = Fault("distribution", f"{name}: {pool.p_values()}")
                self._keep(chosen, [], 0, fault)
        self._log(f"{len(self.engines)} engines, {self.judge.counts['driven']} streams\n")

    def _start(self, chosen: dict) -> Running | None:
        try:
            return Running(chosen)
        except Exception as error:
            self._log(f"does not start: {error!r}\n{json.dumps(chosen)}\n")
            self.refused.append(repr(error))
            return None

    def _keep(self, chosen: dict, stream: list[dict], stream_seed: int, fault: Fault) -> None:
        if fault.kind in self.found:
            self.found[fault.kind].times += 1
            return
        number, seconds = self.judge.counts["driven"], time.monotonic() - self._begun
        self._log(f"stream {number}: {fault.check}: {fault.what}\n")
        self.found[fault.kind] = entry = Found(fault, number, seconds, "")
        if stream and self._shrink_seconds and fault.check != "acceptance":
            stream = self._shrunk(chosen, stream, stream_seed, fault)
        entry.script = script(chosen, stream, stream_seed, fault, self.runner)
        self._log(entry.script)

    def _shrunk(self, chosen, stream, stream_seed, fault: Fault) -> list[dict]:
        held: list[Running] = []

        def fails(candidate: list[dict]) -> bool:
            if not held:
                held.append(Running(chosen))
            faults = self.judge.check(held[0], candidate, stream_seed, pools=False)
            if any(f.ends_engine for f in faults):
                held.pop().end()
            return any(f.kind == fault.kind for f in faults)

        stream = shrink(stream, fails, self._shrink_seconds)
        for running in held:
            running.end()
        return stream

    def _drawn(self, strategy, count: int) -> list:
        """Examples of hypothesis, new ones at each call."""
        drawn: list = []

        @seed(hash((self.number, len(self.engines), self.runner == "v1", count)))
        @hypothesis_settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def note(example) -> None:
            drawn.append(example)

        note()
        return drawn

    def report(self) -> dict:
        """What was tried, and what was found."""
        judge, seconds = self.judge, time.monotonic() - self._begun
        pools = judge.distribution.pools
        return {
            "runner": self.runner,
            "seconds": round(seconds),
            "engines": len(self.engines),
            "engines that did not start": self.refused,
            "streams driven": judge.counts["driven"],
            "streams a minute, engine starts and shrinking left out": round(
                60 * judge.counts["driven"] / max(self._checked_s, 1e-9)
            ),
            "requests": judge.counts["requests"],
            "left by the client": judge.counts["aborted"],
            "tokens": judge.counts["tokens"],
            "greedy answers compared": judge.stock.num_compared,
            "of which part at a tie": judge.stock.num_ties,
            "seeded answers compared": judge.seeds.num_compared,
            "of which part with one seed of three": judge.seeds.num_roundings,
            "sampled tokens pooled": {name: pool.num_tokens for name, pool in pools.items()},
            "p-values": {name: pool.p_values() for name, pool in pools.items()},
            "settings tried": _tally(self.engines),
            "faults": {
                kind: {
                    "streams": found.times,
                    "first after streams": found.first_stream,
                    "first after seconds": round(found.after_s),
                    "what": found.fault.what,
                }
                for kind, found in self.found.items()
            },
        }


def _tally(chosen: list[dict]) -> dict:
    """How often each value of each setting was tried."""
    tally: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in chosen:
        own = {"model": one["model"], "lora": one["lora"], **one["engine"]}
        for name, value in (own | (one["triforce"] or {})).items():
            tally[name][str(value)] += 1
    return {name: dict(sorted(values.items())) for name, values in tally.items()}


# Each try may need a fresh engine, which takes seconds: hypothesis would take hundreds of them.
def shrink(stream: list[dict], fails: Callable[[list[dict]], bool], seconds: float) -> list[dict]:
    """The smallest stream found in the time given that still fails; maybe the same.

    Args:
        fails: whether a stream shows the fault in question.
    """
    deadline = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(stream):
            if time.monotonic() > deadline:
                return stream
            if fails(candidate):
                stream, is_smaller = candidate, True
                break
    return stream


def _smaller(stream: list[dict]) -> Iterator[list[dict]]:
    """Fewer requests first, then simpler ones."""
    size = len(stream) // 2
    while size:
        for start in range(0, len(stream), size):
            if rest := stream[:start] + stream[start + size :]:
                yield rest
        size //= 2
    for i, request in enumerate(stream):
        for simpler in _simpler(request):
            yield [*stream[:i], simpler, *stream[i + 1 :]]


def _simpler(request: dict) -> Iterator[dict]:
    """The request with one thing less, or with less of it."""
    params, prompt = request["params"], request["prompt"]
    for key in ("abort", "priority", "lora", "pause", "reset", "turns"):
        if request.get(key):
            yield _without(request, key)
    if request["arrive"]:
        yield request | {"arrive": 0}
    kept = ("max_tokens", "temperature", "ignore_eos")
    changed = [_without(params, key) for key in params if key not in kept]
    if params["temperature"]:
        greedy = _without(params, "top_p", "top_k", "min_p", "seed", "n") | {"temperature": 0}
        changed.append(greedy)
    if params["max_tokens"] > 1 and params.get("min_tokens", 0) <= params["max_tokens"] // 2:
        changed.append(params | {"max_tokens": params["max_tokens"] // 2})
    yield from (request | {"params": own} for own in changed)
    if prompt.get("shared"):
        yield request | {"prompt": prompt | {"shared": 0}}
    if prompt["length"] > 8:
        yield request | {"prompt": prompt | {"length": prompt["length"] // 2}}


def _without(its: dict, *names: str) -> dict:
    return {name: value for name, value in its.items() if name not in names}
