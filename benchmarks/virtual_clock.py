"""Decode with a real engine of Runner V1 on a virtual clock.

    python benchmarks/virtual_clock.py build/smollm2/gqa --costs benchmarks/costs/smollm2_gqa.json \
        --keys '{"model": "examples/models/smollm2_head"}' --texts FILE FILE

Tokens and their acceptance are the model's; seconds are those of a table of measured passes, with
the contexts that the table is asked for (``--context``), not those that are decoded. So a rule is
judged by the same texts and costs on any machine, beside any other process; in a benchmark, the
machine's moods are larger than what a rule gains. The engine sees noise all the same: each pass
varies by 5 %, the machine is 1.25 times slower at times, and start-up measurements are off by 10 %.
Speeds are counted without that noise. ``--costs`` is measured first where it does not exist, on
idle cores. Preload vLLM's OpenMP as the Makefile does for ``make demo``.
"""

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm import LLM, SamplingParams

from tests.inside import controller_of
from vllm_triforce.controller import CostModel
from vllm_triforce.controller.exploration import Exploration
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.runner_v1 import calibration, plain_steps, runner, speculator
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.sources.draft_model import DraftModel

# Seconds of a step beside its passes, of verifying any drafts, of a decision, of a token of a
# window that is read, and of a token of context in a request's first selection: about those of an
# engine with SmolLM2 on two cores.
STEP_S, VERIFY_S, DECISION_S = 0.004, 0.002, 0.001
READ_S, SELECT_S = 7.5e-5, 4.9e-6
# Seconds of a pass vary by this share, and each start-up's measurement of a kind of pass.
NOISE, START_UP_NOISE = 0.05, 0.1
# The machine changes about so often between its speed and a slower one.
MOOD_S, SLOWER = 20.0, 1.25


class VirtualClock:
    """Stands for the module ``time``.

    Args:
        truth: costs of all passes.
        context: tokens that passes are priced at.
    """

    def __init__(self, truth: CostModel, context: int) -> None:
        self.truth, self.context = truth, context
        self.is_greedy = True
        self.work_s = 0.0
        """Seconds of all passes without noise."""
        self.restart(0)

    def restart(self, seed: int) -> None:
        """Begin at 0 with the noise of ``seed``."""
        self._now, self._mood_until, self._slowness = 0.0, 0.0, 1.0
        self._draw = random.Random(seed)

    def perf_counter(self) -> float:
        """Return the seconds since the start, with noise."""
        return self._now

    monotonic = perf_counter

    def advance(self, seconds: float) -> None:
        """Add work of ``seconds``."""
        if self._now >= self._mood_until:
            self._mood_until = self._now + self._draw.expovariate(1 / MOOD_S)
            self._slowness = self._draw.choice((1.0, SLOWER))
        self.work_s += seconds
        self._now += seconds * self._slowness * max(0.5, self._draw.gauss(1, NOISE))

    def test_seconds(self, num_tokens: int) -> float:
        return 0.0 if self.is_greedy else num_tokens * self.truth.measured.test_per_token

    # What the passes take, by the arguments of the methods that run them.

    def full_pass(self, steps, scheduler_output, *args, **kwargs) -> float:
        cached = scheduler_output.scheduled_cached_reqs
        if scheduler_output.scheduled_new_reqs or not cached.req_ids:
            return 0.0  # prompts are not timed
        drafts = scheduler_output.scheduled_spec_decode_tokens
        tokens = [1 + sum(t >= 0 for t in drafts.get(name, ())) for name in cached.req_ids]
        num_drafts = sum(tokens) - len(tokens)
        seconds = self.truth.full_pass(tokens, [self.context] * len(tokens)) + STEP_S
        return seconds + VERIFY_S * (num_drafts > 0) + self.test_seconds(num_drafts)

    def draft_pass(self, model, feed, slots) -> float:
        num_read = sum(len(row.token_ids) - 1 for row in feed)
        return self.truth.draft(len(feed)) + num_read * READ_S

    def selection(self, level2, batch) -> float:
        num_new = sum(name not in level2.cache for name in batch.request_ids)
        return num_new * self.context * SELECT_S

    def level2_pass(self, level2, batch, proposal, rows, drafts) -> float:
        lengths = [len(tokens) + 1 for tokens in drafts]
        seconds = self.truth.level2(len(rows), max(lengths), self.context)
        return seconds + self.test_seconds(sum(lengths))

    def decision(self, *args, **kwargs) -> float:
        return DECISION_S


def advance_by(clock: VirtualClock, owner: type, name: str, seconds) -> None:
    """Make a method advance the clock by what ``seconds`` returns for its arguments."""
    method = getattr(owner, name)

    def timed(*args, **kwargs):
        more_s = seconds(*args, **kwargs)
        result = method(*args, **kwargs)
        clock.advance(more_s)
        return result

    setattr(owner, name, timed)


def install(clock: VirtualClock) -> None:
    """Give Runner V1's modules the clock, and contexts as the table is asked for them."""
    for module in (plain_steps, runner, speculator):
        module.time = clock  # type: ignore[assignment]
    advance_by(clock, plain_steps.PlainSteps, "execute_model", clock.full_pass)
    advance_by(clock, DraftModel, "_forward", clock.draft_pass)
    advance_by(clock, RetrievalLevel, "begin", clock.selection)
    advance_by(clock, RetrievalLevel, "forward", clock.level2_pass)
    advance_by(clock, Exploration, "choose", clock.decision)
    candidate, step_time = speculator.Candidate, plain_steps.StepTime
    speculator.Candidate = lambda name, context, *args: candidate(  # type: ignore
        name, clock.context, *args
    )
    plain_steps.StepTime = lambda is_greedy, tokens, contexts, **kwargs: step_time(  # type: ignore
        is_greedy, tokens, [clock.context] * len(tokens), **kwargs
    )
    calibration.Calibration.run = lambda self: clock.truth.measured  # type: ignore


def measured_at_start_up(truth: Measurements, seed: int) -> CostModel:
    """Return costs whose full passes, and whose passes of level 2, are off by some percent."""
    draw = random.Random(seed)
    full, level2 = (max(0.7, draw.gauss(1, START_UP_NOISE)) for _ in range(2))

    def off(points: list, factor: float) -> list:
        if isinstance(points[0][1], list):
            return [(count, off(inner, factor)) for count, inner in points]
        return [(count, factor * seconds) for count, seconds in points]

    return CostModel(
        replace(
            truth,
            full_by_rows=off(truth.full_by_rows, full),
            full_by_tokens=off(truth.full_by_tokens, full),
            level2_by_tokens=off(truth.level2_by_tokens, level2),
            level2_by_batch=off(truth.level2_by_batch, level2),
        )
    )


def read_costs(path: Path) -> Measurements:
    """Read ``Measurements`` from JSON, which has lists for tuples."""

    def points(value):
        if isinstance(value, list) and value and isinstance(value[0], list):
            return [tuple(map(points, point)) for point in value]
        return value

    return Measurements(**{key: points(v) for key, v in json.loads(path.read_text()).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--keys", type=json.loads, default={}, help="TriForce's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=2, help="of each text")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--context", type=int, default=7000, help="that passes are priced at")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--starts", type=int, default=2, help="start-ups, each with its error")
    args = parser.parse_args()
    if args.costs.exists():
        clock = VirtualClock(CostModel(read_costs(args.costs)), args.context)
        install(clock)
    llm = LLM(
        args.model,
        speculative_config={"method": "triforce", **args.keys},
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=2,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.25,
        distributed_executor_backend="uni",
    )
    controller = controller_of(llm)
    if not args.costs.exists():
        args.costs.write_text(json.dumps(controller.model.measured.to_dict(), indent=1))
        sys.exit(f"{args.costs} is written: run the command again")
    prompts = []
    for text in args.texts:
        ids = llm.get_tokenizer()(text.read_text())["input_ids"]
        stride = (len(ids) - args.prompt_tokens) // args.prompts
        prompts += [ids[i * stride :][: args.prompt_tokens] for i in range(args.prompts)]
    preferred = controller._preferred
    sources = [preferred, *(its for its in controller.sources if its is not preferred)]
    plain_s = (args.tokens - 1) * (clock.truth.full_pass([1], [args.context]) + STEP_S)
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=args.tokens, ignore_eos=True)
        clock.is_greedy, speeds = temperature == 0, []
        for start in range(args.starts):
            controller.__init__(controller.config, sources)  # type: ignore[misc]
            controller.clock = clock.perf_counter
            controller.start(measured_at_start_up(clock.truth.measured, start))
            clock.restart(start)
            for i in random.Random(start).sample(range(len(prompts)), len(prompts)):
                torch.manual_seed(len(prompts) * start + i)
                before_s = clock.work_s
                llm.generate({"prompt_token_ids": prompts[i]}, params, use_tqdm=False)
                speeds.append(plain_s / (clock.work_s - before_s))
        mean, least = statistics.geometric_mean(speeds), min(speeds)
        print(f"T={temperature:g}: {mean:.3f} of plain decoding, at least {least:.2f}: ", end="")
        print(" ".join(f"{speed:.2f}" for speed in speeds), flush=True)


if __name__ == "__main__":
    main()
