"""The matrix on Model Runner V2, in a process of its own: Triton's interpreter, which stands in
for a GPU, must be in place before vLLM is imported.

``python -m tests.parity.device FOLDER`` runs the jobs that lie there and leaves what it saw.
"""

import os
import pickle
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from tests.images import install
from tests.inside import built, scheduler_of, worker_of
from tests.parity.cases import SOME_GIB
from tests.parity.dice import Dice
from tests.parity.disturbing import Poison, are_finite, replaced, watch
from tests.parity.running import Job, Seen, run
from tests.v2.engine import EnginesV2, speculator_of
from tests.v2.environment import v2_environment

JOBS = "jobs.pickle"


class Device:
    """All jobs in one child process, one after the other, each awaited when it is asked for."""

    def __init__(self, jobs: list[Job], folder: Path) -> None:
        self._folder = folder
        self._numbers = {job.name: number for number, job in enumerate(jobs)}
        (folder / JOBS).write_bytes(pickle.dumps(jobs))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.device", str(folder)],
            cwd=Path(__file__).parents[2],
            env=v2_environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def outcome(self, job: Job) -> Seen:
        path = _result(self._folder, self._numbers[job.name])
        while not path.exists():
            try:
                self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            if not path.exists():
                raise RuntimeError(f"it ended: {(self._folder / 'log').read_text()[-5000:]}")
        seen = pickle.loads(path.read_bytes())
        if isinstance(seen, str):
            raise RuntimeError(seen)
        return seen

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


def _result(folder: Path, number: int) -> Path:
    return folder / f"{number}.pickle"


class _PredictedBytes:
    """What full passes must have read of host memory, as the scheduler has it: each request's
    blocks of each layer there."""

    def __init__(self, worker) -> None:
        self._worker = worker
        self._placed = worker.offload.placement
        self._block_size = worker.vllm_config.cache_config.block_size
        self._before = worker.triforce.counters.num_staged_bytes
        self._num_blocks = 0
        execute = getattr(worker.execute_model, "execute", worker.execute_model)

        def counted(scheduler_output, *args, **kwargs):
            self._add(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        counted.execute = execute
        worker.execute_model = counted

    def _add(self, its) -> None:
        cached = its.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in its.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        for name, number in its.num_scheduled_tokens.items():
            self._num_blocks += -(-(computed[name] + number) // self._block_size)

    def check(self) -> None:
        counted = self._worker.triforce.counters.num_staged_bytes - self._before
        placed = self._placed
        assert counted == self._num_blocks * placed.page_bytes * placed.num_host_layers > 0


class _Inside:
    """The driver, in the child."""

    def __init__(self) -> None:
        self._engines = EnginesV2()
        self._has_warned: set[int] = set()

    def engine(self, job: Job):
        llm = self._engines.get(job.target, job.triforce, **job.engine)
        worker = worker_of(llm)
        worker.triforce.__dict__.pop("begin_step", None)
        self._predicted: _PredictedBytes | None = None
        if worker.offload is not None:
            placed = worker.offload.placement
            is_some = job.triforce["kv_offload_gib"] == SOME_GIB
            assert placed.num_device_layers > 0 if is_some else placed.num_host_layers > 1
            self._predicted = _PredictedBytes(worker)
        if job.dice:
            _plan_by_dice(worker.triforce, job.dice)
        return llm

    def check(self) -> None:
        """Behind a job."""
        if self._predicted is not None:
            self._predicted.check()

    def policy(self, llm) -> str:
        if not speculator_of(llm).config.uses_level2:
            return ""
        return built(llm).speculator.level2.selections.policy.name

    def held(self, llm) -> dict[str, int]:
        held = llm.collective_rpc("triforce_held_requests")[0]
        if speculator_of(llm).config.is_plain:
            return held
        parts = built(llm)
        return {**held, "slots that are not free": parts.num_slots - parts.slots.num_free}

    @contextmanager
    def disturbed(self, llm, kind: str, level: int, at_pass: int, together: int):
        assert kind == "nan"
        from vllm_triforce.controller.routes import HIERARCHICAL
        from vllm_triforce.core.limits import logger

        speculator, rows = built(llm).speculator, built(llm).rows
        # Level 1's last is that of a single token.
        owner = speculator.level2.model_pass if level == 2 else speculator.level1.passes[-1]
        layer = owner.model.model.layers[2 if level == 2 else 0]

        def is_due(number: int) -> bool:
            """Some pass later, if not all requests propose yet, or the first does not take part."""
            takes_part = bool(rows.length[0] < rows.room[0] - 1)
            return number >= at_pass and rows.num_rows == together and takes_part

        poison = Poison(owner.model, layer, is_due)
        warnings: list[str] = []
        said: dict = {}
        scheduler, adapter, slots = scheduler_of(llm), worker_of(llm).triforce, built(llm).slots
        proposed: list[tuple[list[str], set[str]]] = []
        released: list[tuple[str, bool]] = []

        def propose(route, batch, draft_tokens):
            if route == HIERARCHICAL:
                proposed.append((list(batch.request_ids), set(adapter.plan.proposing)))
            return original_propose(route, batch, draft_tokens)

        def release(name: str):
            released.append((name, adapter.plan is not None and name in adapter.plan.disabled))
            return original_release(name)

        with (
            replaced(logger, "warning", lambda *a: warnings.append(a[0] % a[1:])),
            replaced(owner, "model", poison),
            replaced(speculator, "propose", propose) as original_propose,
            replaced(slots, "release", release) as original_release,
            watch(scheduler, "plan_step") as plans,
        ):
            yield said
        # Of an engine, the first is logged.
        is_first = id(llm) not in self._has_warned
        self._has_warned.add(id(llm))
        hit = next(names[0] for names, _ in proposed if len(names) == together)
        said |= {
            "struck": poison.has_struck,
            "warned": [w.startswith("NaN in level 1's or level 2's") for w in warnings]
            == [True] * is_first,
            "rows": [len(names) for names, _ in proposed],
            # Ranks see a NaN at different times, and the plan is what they share.
            "as planned": all(set(names) == planned for names, planned in proposed)
            and next(by_plan for name, by_plan in released if name == hit),
            # Whether the scheduler takes the one that is hit for able to propose.
            "able": [hit in able for (able, *_), _ in plans],
            "finite": are_finite(llm),
        }


def _plan_by_dice(speculator, seed: int) -> None:
    """In the place of the scheduler's plan."""
    from vllm_triforce.core.messages import StepPlan

    dice = Dice(speculator, seed)

    def begin_step(scheduler_output) -> None:
        speculator.take_blocks_back(scheduler_output)
        most = speculator.num_speculative_steps
        able = {name: most for name in scheduler_output.num_scheduled_tokens}
        speculator.plan = StepPlan(0, dice.proposing(able))

    speculator.begin_step = begin_step


def main() -> None:
    install()
    folder = Path(sys.argv[1])
    driver = _Inside()
    for number, job in enumerate(pickle.loads((folder / JOBS).read_bytes())):
        try:
            seen = run(job, driver)
            driver.check()
        except Exception:
            seen = traceback.format_exc()
        path = _result(folder, number)
        path.with_suffix(".part").write_bytes(pickle.dumps(seen))
        os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    main()
