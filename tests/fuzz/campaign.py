"""Run random streams through random engines, both drawn by hypothesis."""

import argparse
import json
import sys
import time

from tests.fuzz.judge import Fault, Judge, Running
from tests.fuzz.replay import script
from tests.fuzz.settings import settings as settings_strategy
from tests.fuzz.streams import drawn, streams

# A pretrained model's streams take as long as many of the others.
OF_SMOLLM2 = 5
# Of a right distribution once in a hundred thousand runs; looked at after every engine.
LEAST_P_VALUE = 1e-5


class Campaign:
    """Fuzz until a deadline or a number of engines; for Runner V2 in a process of its environment.

    Args:
        args: of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.judge = Judge()
        self.found: dict[str, dict] = {}
        """Of each kind of fault: how it first showed, and how often."""
        self.num_engines = 0
        self.refused: list[str] = []
        self._begun = time.monotonic()

    def run(self) -> None:
        """Fuzz; the time includes shrinking."""
        args, deadline = self._args, time.monotonic() + 60 * self._args.minutes
        settings = settings_strategy(args.runner, args.model, args.connectors)
        while time.monotonic() < deadline and self.num_engines < args.most_engines:
            for chosen in self._drawn(settings, 8):
                if time.monotonic() > deadline or self.num_engines >= args.most_engines:
                    break
                if args.control:
                    # Stock's own Runner V1 mixes requests' thinking budgets up (patches/README.md).
                    engine = {k: v for k, v in chosen["engine"].items() if k != "reasoning"}
                    chosen = chosen | {"triforce": None, "engine": engine}
                self._one_engine(chosen, deadline)

    def _one_engine(self, chosen: dict, deadline: float) -> None:
        self.num_engines += 1
        running = self._start(chosen)
        if running is None:
            return
        count = self._args.per_engine
        if chosen["model"] == "smollm2":
            count = max(1, count // OF_SMOLLM2)
        for stream in self._drawn(streams(chosen, self._args.runner), count):
            if self.judge.counts["driven"] and time.monotonic() > deadline:
                break
            if running is None and (running := self._start(chosen)) is None:
                break
            stream_seed = self._args.seed * 1_000_000 + self.judge.counts["driven"]
            self.judge.counts["driven"] += 1
            faults = self.judge.check(running, stream, stream_seed)
            is_new = any(fault.kind not in self.found for fault in faults)
            if any(fault.ends_engine for fault in faults) or (is_new and self._args.shrink_seconds):
                # Shrinking starts engines, and ending those takes the process groups from others.
                running.end()
                running = None
            for fault in {fault.kind: fault for fault in faults[::-1]}.values():
                self._keep(chosen, stream, stream_seed, fault)
        if running is not None:
            running.end()
        for name, pool in self.judge.distribution.pools.items():
            if pool.p_value() < LEAST_P_VALUE:
                fault = Fault("distribution", f"{name}: {pool.p_values()}")
                self._keep(chosen, [], 0, fault)
        _log(f"{self.num_engines} engines, {self.judge.counts['driven']} streams")

    def _start(self, chosen: dict) -> Running | None:
        try:
            return Running(chosen)
        except Exception as error:
            _log(f"does not start: {error!r}\n{json.dumps(chosen)}")
            self.refused.append(repr(error))
            return None

    def _keep(self, chosen: dict, stream: list[dict], stream_seed: int, fault: Fault) -> None:
        if fault.kind in self.found:
            self.found[fault.kind]["streams"] += 1
            return
        number, seconds = self.judge.counts["driven"], time.monotonic() - self._begun
        _log(f"stream {number}: {fault.check}: {fault.what}")
        self.found[fault.kind] = {
            "streams": 1,
            "first after streams": number,
            "first after seconds": round(seconds),
            "what": fault.what,
        }
        if stream and self._args.shrink_seconds:
            stream = self._shrunk(chosen, stream, stream_seed, fault)
        print(script(chosen, stream, stream_seed, fault, self._args.runner), flush=True)

    def _shrunk(
        self, chosen: dict, stream: list[dict], stream_seed: int, fault: Fault
    ) -> list[dict]:
        """Leave out requests without which the fault still shows, while there is time.

        Each try may need a fresh engine, which takes seconds: hypothesis would take hundreds.
        """
        deadline = time.monotonic() + self._args.shrink_seconds
        running: Running | None = None
        size = len(stream) // 2
        while size:
            for start in range(0, len(stream), size):
                rest = stream[:start] + stream[start + size :]
                if not rest or time.monotonic() > deadline:
                    continue
                running = running or Running(chosen)
                faults = self.judge.check(running, rest, stream_seed, pools=False)
                if any(each.ends_engine for each in faults):
                    running.end()
                    running = None
                if any(each.kind == fault.kind for each in faults):
                    stream = rest
                    break
            else:
                size //= 2
            size = min(size, len(stream) - 1)
        if running is not None:
            running.end()
        return stream

    def _drawn(self, strategy, count: int) -> list:
        """Examples of hypothesis, new ones at each call."""
        number = (self._args.seed, self.num_engines, self._args.runner == "v1", count)
        return drawn(strategy, count, number)

    def report(self) -> dict:
        """What was tried, and what was found."""
        judge, seconds = self.judge, time.monotonic() - self._begun
        pools = judge.distribution.pools
        return {
            "runner": self._args.runner,
            "seconds": round(seconds),
            "engines": self.num_engines,
            "engines that did not start": self.refused,
            "streams driven": judge.counts["driven"],
            "requests": judge.counts["requests"],
            "left by the client": judge.counts["aborted"],
            "tokens": judge.counts["tokens"],
            "greedy answers compared": judge.stock.num_compared,
            "of which part at a tie": judge.stock.num_ties,
            "seeded answers compared": judge.seeds.num_compared,
            "of which part with one seed of three": judge.seeds.num_roundings,
            "sampled tokens pooled": {name: pool.num_tokens for name, pool in pools.items()},
            "p-values": {name: pool.p_values() for name, pool in pools.items()},
            "faults": self.found,
        }


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
