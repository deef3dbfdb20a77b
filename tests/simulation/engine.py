"""vLLM's schedulers, stock and ours, over the fake worker, with the engine core's loop on a
simulated clock."""

import copy
import functools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.request import Request, RequestStatus

from tests.models import PAIR
from tests.simulation.worker import STOP, Step, Worker
from tests.simulation.world import World
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.keys import METHOD
from vllm_triforce.scheduler.v2 import TriForceAsyncSchedulerV2, TriForceSchedulerV2

# Of the host, hidden behind the device.
DECISION_S = 0.0005


class _OnRunnerV2(VllmConfig):
    """vLLM's configuration as it is with Model Runner V2, which needs Triton to be asked for."""

    use_v2_model_runner = True


@functools.cache
def _configured(is_ours: bool, keys: tuple = ()) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_triforce import plugin
    from vllm_triforce.config import checks

    plugin.register()
    spec = {"method": METHOD, "model": str(PAIR / "draft"), **dict(keys)} if is_ours else None
    with patch.object(checks, "has_fixed_shapes", lambda: True):
        args = EngineArgs(
            model=str(PAIR / "target"),
            speculative_config=spec,
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=32,
        )
        return args.create_engine_config()


def _any_token() -> SimpleNamespace:
    """Return a manager of grammars that allow everything."""
    return SimpleNamespace(
        vllm_config=None,
        accept_tokens=lambda request, tokens: True,
        validate_tokens=lambda request, tokens: tokens,
        grammar_bitmask=lambda *_: None,
    )


def make_scheduler(
    is_ours: bool,
    is_asynchronous: bool = True,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 131_072,
    num_blocks: int = 20_000,
    block_size: int = 32,
    prefix_caching: bool = False,
    scheduler_cls: type | None = None,
    more_specs: Iterable[KVCacheSpec] = (),
    **keys,
):
    """With a KV cache of so many blocks, of a layer with full attention and more layers; ``keys``
    are TriForce's, whose schedulers for Runner V2 are the default."""
    config = copy.copy(_configured(is_ours, tuple(sorted(keys.items()))))
    config.__class__ = _OnRunnerV2
    for part in ("scheduler_config", "cache_config", "model_config", "additional_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.scheduler_config.async_scheduling = is_asynchronous
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = max_num_batched_tokens
    config.model_config.max_model_len = max_model_len
    config.cache_config.enable_prefix_caching = prefix_caching
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    if is_ours:
        config.additional_config[METHOD] = {
            **config.additional_config[METHOD],
            "block_size": block_size,
        }
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    specs = [spec, *more_specs]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks, [], groups)
    schedulers = {
        (False, False): Scheduler,
        (False, True): AsyncScheduler,
        (True, False): TriForceSchedulerV2,
        (True, True): TriForceAsyncSchedulerV2,
    }
    return (scheduler_cls or schedulers[is_ours, is_asynchronous])(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=_any_token(),
        block_size=math.lcm(*(spec.block_size for spec in specs)),
        hash_block_size=block_size,
        log_stats=False,
    )


@dataclass
class Arrival:
    """A request and when it comes."""

    at: float
    prompt: int
    max_tokens: int
    params: dict = field(default_factory=dict)
    stops_after: int | None = None
    """Tokens after which it emits a stop token."""
    aborted_after: float | None = None
    prefix: int = 0
    """Number of the text that its prompt shares with others'; 0: with nobody's."""


@dataclass
class Served:
    """A request that is over."""

    at: float
    first: float
    last: float
    num_tokens: int

    @property
    def per_token(self) -> float:
        """Seconds between its tokens."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)


class Engine:
    """The engine core, one step of its loop at a time."""

    def __init__(self, scheduler, world: World) -> None:
        self.scheduler, self.now = scheduler, 0.0
        self._num_reads, self._last_read = 0, 0.0
        self._config = self._measured = None
        settings = scheduler.vllm_config
        if METHOD in (settings.additional_config or {}):
            keys = dict(settings.additional_config[METHOD])
            keys.pop("draft_model")
            self._config = ResolvedConfig(**keys)
            scheduler.clock = self._read_clock
            longest, most = scheduler.max_model_len - 64, scheduler.max_num_running_reqs
            self._measured = world.machine.measured(self._config, longest, most)
        self._is_asynchronous = settings.scheduler_config.async_scheduling
        self.worker = Worker(
            world,
            self._config,
            self._is_asynchronous,
            scheduler.max_model_len,
            scheduler.block_size,
            self._measured,
            is_short_of_memory=scheduler.kv_cache_config.num_blocks < 100,
        )
        self._queue: deque[tuple[object, Step, float]] = deque()
        self._free_at = self._last_output = 0.0
        self._aborts: list[tuple[float, str]] = []
        self.seen: list[Step] = []
        """Steps whose output has come."""
        self.served: dict[str, Served] = {}
        self.first: dict[str, float] = {}
        self._asked: dict[str, Arrival] = {}
        self.emitted: dict[str, int] = {}
        self._num_requests = self.num_preempted = 0
        init_none_hash(sha256)
        is_caching = scheduler.cache_config.enable_prefix_caching
        hasher = get_request_block_hasher(scheduler.block_size, sha256)
        self._hasher = hasher if is_caching else None

    def _read_clock(self) -> float:
        """Return the time; a decision, between two readings, takes a while on the host."""
        self._num_reads = self._num_reads + 1 if self.now == self._last_read else 0
        self._last_read = self.now
        return self.now + self._num_reads * DECISION_S

    def add(self, arrival: Arrival) -> str:
        name, self._num_requests = f"r{self._num_requests}", self._num_requests + 1
        params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, **arrival.params)
        params.stop_token_ids = [STOP]
        text = arrival.prefix or 1000 + self._num_requests
        request = Request(
            name,
            [text] * arrival.prompt,
            params,
            None,
            arrival_time=arrival.at,
            block_hasher=self._hasher,
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = SimpleNamespace()  # it is compiled
        if arrival.stops_after is not None:
            self.worker.stops[name] = arrival.prompt + arrival.stops_after - 1
        if arrival.aborted_after is not None:
            self._aborts.append((arrival.at + arrival.aborted_after, name))
        self._asked[name], self.emitted[name] = arrival, 0
        self.scheduler.add_request(request)
        return name

    def run(self, arrivals: Iterable[Arrival], until=None) -> None:
        """Serves what arrives, to the end; ``until`` may end it before."""
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        num_idle = 0
        while waiting or self.scheduler.has_requests() or self._queue:
            if not self.scheduler.has_requests() and not self._queue:
                self.now = self._last_output = max(self.now, waiting[0].at)
            while waiting and waiting[0].at <= self.now:
                self.add(waiting.popleft())
            before = len(self.seen)
            self._turn()
            num_idle = 0 if len(self.seen) > before else num_idle + 1
            assert num_idle < 1000, f"nobody gets on: {list(self.scheduler.requests.values())}"
            if until is not None and until():
                return

    def _turn(self) -> None:
        """As ``EngineCore.step_with_batch_queue()``, or ``step()``."""
        deferred = None
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._check(step)
            self.now += self.worker.world.machine.scheduling
            if self._is_asynchronous and step.pending_structured_output_tokens:
                deferred = step  # what its grammar allows depends on the output before
            else:
                self._submit(step)
                if self._is_asynchronous and len(self._queue) < 2:
                    return
        if self._queue:
            self._take_output()
        if deferred is not None:
            drafts = self.worker.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids_in_output(drafts, deferred)
            self.scheduler.get_grammar_bitmask(deferred)
            self._submit(deferred)

    def _submit(self, step) -> None:
        done = self.worker.execute(step)
        for name in step.num_scheduled_tokens:
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            # A request that has ended meanwhile has none.
            assert blocks in ([], self.worker.blocks_of(name)), "the worker has another block table"
        begun = max(self._free_at, self.now)
        self._free_at = begun + done.full + done.proposing
        self._queue.append((step, done, begun + done.full))

    def _check(self, step) -> None:
        """Nothing is scheduled for who is not there."""
        self.num_preempted += len(step.preempted_req_ids or ())
        assert step.num_scheduled_tokens.keys() <= self.scheduler.requests.keys()
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())

    def _take_output(self) -> None:
        step, done, at = self._queue.popleft()
        self.now = max(self.now, at)
        self._abort()
        given = 0
        for outputs in self.scheduler.update_from_output(step, done.output).values():
            for output in outputs.outputs:
                given += len(output.new_token_ids)
                self._note(output)
        if step.total_num_scheduled_tokens:
            done.seconds, done.num_tokens = self.now - self._last_output, given
            self.seen.append(done)
            self._last_output = self.now
        if not self._is_asynchronous and step.total_num_scheduled_tokens:
            drafts = self.worker.take_draft_token_ids()
            if drafts is not None:
                self.now = max(self.now, self._free_at if done.proposing else self.now)
                self.scheduler.update_draft_token_ids(drafts)

    def _note(self, output) -> None:
        name = output.request_id
        if output.new_token_ids:
            self.first.setdefault(name, self.now)
            self.emitted[name] += len(output.new_token_ids)
        if output.finish_reason is not None:
            arrival, count = self._asked[name], self.emitted[name]
            expected = arrival.max_tokens
            if arrival.stops_after is not None:
                expected = min(expected, arrival.stops_after)
            expected = min(expected, self.scheduler.max_model_len - arrival.prompt)
            assert count == expected, (name, count, expected)
            self.served[name] = Served(arrival.at, self.first[name], self.now, count)

    def _abort(self) -> None:
        due = [name for at, name in self._aborts if at <= self.now]
        self._aborts = [its for its in self._aborts if its[0] > self.now]
        if due:
            self.scheduler.finish_requests(due, RequestStatus.FINISHED_ABORTED)

    def check_empty(self) -> None:
        """Everybody has left, and nothing is kept of anybody."""
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.running
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # and the null block
        if self._config is None:
            return
        # What was kept is released when the next step is planned.
        self.add(Arrival(self.now, 4, 1))
        self.run([])
        assert len(scheduler._with_slots) <= 1
        if (decisions := scheduler.decisions) is not None:
            assert decisions.controller.num_requests <= 1
            assert len(decisions._pending) <= 2
