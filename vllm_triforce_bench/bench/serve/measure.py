"""The loop over phases, pairs and turns."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from vllm_triforce_bench.bench.model_facts import ModelFacts
from vllm_triforce_bench.bench.serve import load
from vllm_triforce_bench.bench.serve.contenders import Contender
from vllm_triforce_bench.bench.serve.requests import Requests
from vllm_triforce_bench.bench.serve.schedule import Pair, Phase
from vllm_triforce_bench.bench.serve.server import Server, running, wait_until_at_rest
from vllm_triforce_bench.bench.serve.settings import ServeSettings
from vllm_triforce_bench.bench.store import Store
from vllm_triforce_bench.bench.terminal import UnitProgress, work_of


class ServeMeasurement:
    """Measures pairs of runs and stores their records."""

    def __init__(
        self,
        settings: ServeSettings,
        contenders: dict[str, Contender],
        target: ModelFacts,
        requests: Requests,
        store: Store,
        progress: UnitProgress,
    ) -> None:
        self._settings, self._contenders, self._target = settings, contenders, target
        self._requests, self._store, self._progress = requests, store, progress

    def run(self, phases: Sequence[Phase], done: set[tuple]) -> None:
        """Measure the missing pairs.

        Args:
            done: keys of the pairs in the store.

        Raises:
            ServerFailed: earlier runs are in the store.
        """
        todo = [
            [pair for pair in phase.schedule(len(self._settings.cells)) if pair.key() not in done]
            for phase in phases
        ]
        self._progress.begin(sum(self._work(pair) for pairs in todo for pair in pairs))
        for phase, pairs in zip(phases, todo):
            if not pairs:
                continue
            with ExitStack() as stack:
                servers = self._start(phase, stack)
                self._warm_up(servers)
                for pair in pairs:
                    self._run_pair(pair, phase, servers)
                    self._progress.finish_unit(self._work(pair))

    def _start(self, phase: Phase, stack: ExitStack) -> dict[str, Server]:
        """Start both servers, one after the other; returns them by role."""
        servers = {}
        for role in phase.start_order:
            contender = self._contenders[phase.contest.server(role)]
            self._progress.say(f"{phase.contest.name}: starting {contender.label}")
            challenge = f"{phase.contest.challenger}-against-{phase.contest.baseline}"
            log = self._store.folder / "logs" / f"{challenge}-{phase.half}-{contender.name}.log"

            def command(port: int, contender: Contender = contender) -> list[str]:
                return contender.command(self._settings, self._target, port)

            servers[role] = stack.enter_context(
                running(contender.name, command, contender.environment(), log)
            )
        return servers

    def _warm_up(self, servers: dict[str, Server]) -> None:
        warm = set()
        for i, cell in enumerate(self._settings.cells):
            prompts = self._requests.warmup(i)
            if cell in warm or not prompts:
                continue
            warm.add(cell)
            for server in servers.values():
                self._progress.say(f"warming up {server.name}: {cell.describe()}")
                self._load(server, servers, i, prompts)

    def _run_pair(self, pair: Pair, phase: Phase, servers: dict[str, Server]) -> None:
        cell = self._settings.cells[pair.cell_index]
        prompts = self._requests.of(pair.pair, pair.cell_index)
        for turn, role in enumerate(pair.roles):
            server = servers[role]
            (idle,) = (other for other in servers.values() if other is not server)
            self._progress.say(
                f"{pair.contest.name}, pair {pair.pair + 1}: {server.name}, {cell.describe()}"
            )
            wait_until_at_rest(servers.values())
            busy_before, idle_before = server.cpu_seconds(), idle.cpu_seconds()
            counts = server.engine_counts()
            result = self._load(server, servers, pair.cell_index, prompts)
            record = {
                "contest": pair.contest.name,
                "half": pair.half,
                "pair": pair.pair,
                "cell_index": pair.cell_index,
                **cell.to_dict(),
                "server": server.name,
                "label": self._contenders[server.name].label,
                "role": role,
                "turn": turn,
                "started_first": phase.start_order[0] == role,
                "sequence": server.runs,
                "requests": len(prompts),
                "ended_at": time.time(),
                "server_cpu_seconds": server.cpu_seconds() - busy_before,
                "idle_server_cpu_seconds": idle.cpu_seconds() - idle_before,
                **{name: n - counts[name] for name, n in server.engine_counts().items()},
                "load_average": os.getloadavg()[0],
                "result": result,
            }
            server.runs += 1
            self._store.append([record])

    def _load(
        self, server: Server, servers: dict[str, Server], cell_index: int, prompts: list[list[int]]
    ) -> dict:
        others = [other for other in servers.values() if other is not server]
        cell = self._settings.cells[cell_index]
        return load.run(server, others, cell, prompts, self._settings, self._store.folder)

    def _work(self, pair: Pair) -> float:
        cell = self._settings.cells[pair.cell_index]
        num_reqs = self._settings.num_requests(cell)
        return work_of(num_reqs, cell.input_len, cell.output_len)
