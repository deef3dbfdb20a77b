"""Servers under load, which take turns; the client is that of ``vllm bench serve``."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark
from vllm.utils.torch_utils import set_random_seed

from vllm_triforce_bench.bench.grid import PairedSet, rotated
from vllm_triforce_bench.bench.measurement import BaseMeasurement
from vllm_triforce_bench.bench.model_facts import engine_arguments
from vllm_triforce_bench.bench.server import MODEL, Server, running
from vllm_triforce_bench.bench.settings import WARMUP, Settings

# OpenMP's threads of the other server spin for a while after its last step.
_REST_S = 1.0


def sets(settings: Settings, num_groups: int) -> list[PairedSet]:
    """List the sets in the order of measurement.

    All groups have the first half of the repetitions, then in reverse the second. A repetition is
    the whole grid on the same servers: each cell comes after the same one each time.
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


@dataclass
class Measurement(BaseMeasurement):
    """Measures two servers at a time."""

    def __post_init__(self) -> None:
        self._numbers = self.settings.prompt_numbers()

    def _run(self, sets: Sequence[PairedSet]) -> None:
        for (dtype, group, half), phase in itertools.groupby(sets, self._phase):
            with ExitStack() as stack:
                servers = self._start(dtype, group, half, stack)
                self._warm_up(dtype, group, servers)
                for paired in phase:
                    self._finish(paired, self._measure(paired, servers))

    def _phase(self, paired: PairedSet) -> tuple[str, int, int]:
        """Return dtype, group, and half of the repetitions: servers start anew when they change."""
        half = paired.repetition >= (self.settings.repetitions + 1) // 2
        return paired.dtype, paired.group, int(half)

    def _start(self, dtype: str, group: int, half: int, stack: ExitStack) -> list[Server]:
        """Start stock vLLM and the other server; in the second half the other one first."""
        settings, servers = self.settings, []
        variants = self.groups[group]
        for variant in rotated(variants, half):
            self.progress.say(f"starting {variant.label}, {dtype}")
            arguments = engine_arguments(settings, dtype, variants[-1], self.target, self.draft)
            name = f"{dtype}-{group}-{half}-{variant.method.replace(':', '-')}.log"
            log = self.store.folder / "logs" / name
            servers.append(stack.enter_context(running(variant, settings.target, arguments, log)))
        return rotated(servers, half)

    def _warm_up(self, dtype: str, group: int, servers: list[Server]) -> None:
        for repetition, context, batch_size, temperature in self._numbers:
            if repetition == WARMUP:
                paired = PairedSet(dtype, context, batch_size, temperature, group, repetition)
                for server in servers:
                    self.progress.say(f"warming up {server.variant.label}")
                    self._load(server, servers, paired)

    def _measure(self, paired: PairedSet, servers: list[Server]) -> list[dict]:
        """Return a record for each server; the order alternates over repetitions and cells."""
        records = {}
        cells = [key[1:] for key in self._numbers]
        turn = paired.repetition + cells.index(paired[1:4])
        for place, server in enumerate(rotated(servers, turn)):
            record = self._begin(server.variant, paired, place, len(servers))
            time.sleep(_REST_S)
            counts = server.engine_counts()
            result = self._load(server, servers, paired)
            records[server.variant] = {
                **record,
                **{name: n - counts[name] for name, n in server.engine_counts().items()},
                "load_average": os.getloadavg()[0],
                "result": result,
            }
        return [records[server.variant] for server in servers]

    def _load(self, server: Server, servers: list[Server], paired: PairedSet) -> dict[str, Any]:
        """Send the requests and return the figures of ``vllm bench serve``, without those of each.

        Raises:
            ServerFailed: a server ended, or a request failed.
        """
        settings, log = self.settings, self.store.folder / "bench.log"
        numbers = self._numbers[paired.repetition, *paired[1:4]]
        if not numbers:
            return {}
        prompts = self.prompts.take(paired.context, numbers.start, len(numbers))
        set_random_seed((settings.seed + paired.repetition) % (1 << 32))  # of times of arrival
        sending = benchmark(**client_arguments(server.address, paired, prompts, settings))
        with log.open("a") as out:
            print(f"--- {server.variant.label}: {paired}", file=out)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                result = asyncio.run(_watched(sending, servers))
        expected = len(prompts) * settings.tokens
        if result["completed"] < len(prompts) or result["total_output_tokens"] != expected:
            raise server.failed(
                f"completed {result['completed']} of {len(prompts)} requests with "
                f"{result['total_output_tokens']} of {expected} tokens; see {log}"
            )
        # Lists have an entry for each request, but those of speculation.
        return {
            name: value
            for name, value in result.items()
            if not isinstance(value, list) or name.startswith("spec_decode")
        }


def client_arguments(
    address: str, paired: PairedSet, prompts: Sequence[list[int]], settings: Settings
) -> dict[str, Any]:
    """Make the arguments of vLLM's client, which sends token ids past any end of sequence."""
    body = {"temperature": paired.temperature}
    if paired.temperature:
        body["top_p"] = settings.top_p
    return {
        "task_type": TaskType.GENERATION,
        "endpoint_type": "openai",
        "api_url": f"{address}/v1/completions",
        "base_url": address,
        "model_id": MODEL,
        "model_name": MODEL,
        # The server counts tokens; without a tokenizer the client leaves out times of tokens.
        "tokenizer": MODEL,
        "input_requests": [SampleRequest(ids, len(ids), settings.tokens) for ids in prompts],
        "logprobs": None,
        "request_rate": settings.request_rate or float("inf"),
        "burstiness": 1.0,
        "disable_tqdm": True,
        "num_warmups": 0,
        "profile": False,
        "selected_percentile_metrics": ["ttft", "tpot", "e2el"],
        "selected_percentiles": [90, 99],
        "ignore_eos": True,
        "goodput_config_dict": {},
        "max_concurrency": paired.batch_size,
        "lora_modules": None,
        "extra_headers": None,
        "extra_body": body,
        "ready_check_timeout_sec": 0,
    }


async def _watched(sending, servers: Sequence[Server]) -> dict[str, Any]:
    """Await the answers; raise ServerFailed as soon as a server has ended."""
    task = asyncio.create_task(sending)
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            for server in servers:
                server.check()
        return task.result()
    finally:
        task.cancel()
