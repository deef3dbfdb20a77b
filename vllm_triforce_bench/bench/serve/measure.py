"""The loop over sets of servers, which take turns."""

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from vllm_triforce_bench.bench.grid import PairedSet, rotated
from vllm_triforce_bench.bench.measurement import BaseMeasurement
from vllm_triforce_bench.bench.model_facts import ModelFacts, engine_arguments
from vllm_triforce_bench.bench.serve import load
from vllm_triforce_bench.bench.serve.server import Server, running
from vllm_triforce_bench.bench.settings import Settings

# OpenMP's threads of the other server spin for a while after its last step.
_REST_S = 1.0
_WARMUP = -1
"""The repetition that is not measured."""


class Measurement(BaseMeasurement):
    """Measures two servers at a time."""

    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self._numbers = prompt_numbers(self._settings)

    @staticmethod
    def fit_at_once(settings: Settings, target: ModelFacts, draft: ModelFacts | None) -> int:
        """Return 2: stock vLLM and another."""
        return 2

    @staticmethod
    def sets(settings: Settings, num_groups: int) -> list[PairedSet]:
        """List the sets in the order of measurement.

        All groups have the first half of the repetitions, then in reverse the second. A repetition
        is the whole grid on the same servers: each cell comes after the same one each time.
        """
        middle, order = (settings.repetitions + 1) // 2, range(num_groups)
        halves = (order, range(middle)), (order[::-1], range(middle, settings.repetitions))
        return [
            PairedSet(dtype, context, batch_size, temperature, group, repetition)
            for dtype in settings.dtypes
            for groups, repetitions in halves
            for group, repetition, context, batch_size, temperature in itertools.product(
                groups, repetitions, settings.contexts, settings.batch_sizes, settings.temperatures
            )
        ]

    def _run(self, sets: Sequence[PairedSet]) -> None:
        for (dtype, group, half), phase in itertools.groupby(sets, self._phase):
            with ExitStack() as stack:
                servers = self._start(dtype, group, half, stack)
                self._warm_up(dtype, group, servers)
                for paired in phase:
                    self._finish(paired, self._measure(paired, servers))

    def _phase(self, paired: PairedSet) -> tuple[str, int, int]:
        """Return dtype, group, and half of the repetitions: servers start anew when they change."""
        half = paired.repetition >= (self._settings.repetitions + 1) // 2
        return paired.dtype, paired.group, int(half)

    def _start(self, dtype: str, group: int, half: int, stack: ExitStack) -> list[Server]:
        """Start stock vLLM and the other server; in the second half the other one first."""
        settings, servers = self._settings, []
        variants = self._groups[group]
        for variant in rotated(variants, half):
            self._progress.say(f"starting {variant.label}, {dtype}")
            arguments = engine_arguments(settings, dtype, variants[-1], self._target, self._draft)
            name = f"{dtype}-{group}-{half}-{variant.method.replace(':', '-')}.log"
            log = self._store.folder / "logs" / name
            servers.append(stack.enter_context(running(variant, settings.target, arguments, log)))
        return rotated(servers, half)

    def _warm_up(self, dtype: str, group: int, servers: list[Server]) -> None:
        for repetition, context, batch_size, temperature in self._numbers:
            if repetition == _WARMUP:
                paired = PairedSet(dtype, context, batch_size, temperature, group, repetition)
                for server in servers:
                    self._progress.say(f"warming up {server.variant.label}")
                    self._load(server, servers, paired)

    def _measure(self, paired: PairedSet, servers: list[Server]) -> list[dict]:
        """Return a record for each server; the order alternates over repetitions and cells."""
        records = {}
        cells = [key[1:] for key in self._numbers]
        turn = paired.repetition + cells.index(paired[1:4])
        for place, server in enumerate(rotated(servers, turn)):
            self._say(server.variant, paired)
            time.sleep(_REST_S)
            counts = server.engine_counts()
            result = self._load(server, servers, paired)
            records[server.variant] = {
                **self._record(server.variant, paired, place, len(servers)),
                **{name: n - counts[name] for name, n in server.engine_counts().items()},
                "load_average": os.getloadavg()[0],
                "result": result,
            }
        return [records[server.variant] for server in servers]

    def _load(self, server: Server, servers: list[Server], paired: PairedSet) -> dict:
        numbers = self._numbers[paired.repetition, *paired[1:4]]
        if not numbers:
            return {}
        prompts = self._prompts.take(paired.context, numbers.start, len(numbers))
        others = [other for other in servers if other is not server]
        log = self._store.folder / "bench.log"
        return load.run(server, others, paired, prompts, self._settings, log)


def prompt_numbers(settings: Settings) -> dict[tuple[int, int, int, float], range]:
    """Number the prompts by repetition, context, batch size and temperature.

    No cell has a prompt of another, which would be in the prefix cache. All groups share them.
    """
    numbers: dict[tuple[int, int, int, float], range] = {}
    cells = (settings.contexts, settings.batch_sizes, settings.temperatures)
    first = 0
    for repetition in (_WARMUP, *range(settings.repetitions)):
        num_reqs = settings.num_warmup if repetition == _WARMUP else settings.num_requests
        for context, batch_size, temperature in itertools.product(*cells):
            count = num_reqs(batch_size)
            numbers[repetition, context, batch_size, temperature] = range(first, first + count)
            first += count
    return numbers
