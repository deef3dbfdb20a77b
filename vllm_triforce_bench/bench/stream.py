"""One batch through one engine, step by step, with the time of every output."""

import itertools
import random
import time
from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_triforce_bench.bench.pass_times import Mark, PassTimes


@dataclass
class Streamed:
    """What arrived, by request; times are seconds since the batch was handed over."""

    token_ids: list[list[int]]
    arrivals: list[list[tuple[float, int]]]
    """Of each request's outputs that brought tokens: when, and how many."""
    num_cached_tokens: list[int] = field(default_factory=list)
    """Prompt tokens that were in the prefix cache."""
    num_steps: int = 0
    seconds: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    """Of each step after the first tokens, where passes are timed."""

    @property
    def time_to_first_token_s(self) -> list[float]:
        return [arrivals[0][0] for arrivals in self.arrivals]

    @property
    def inter_token_latency_s(self) -> list[float]:
        """Between two outputs of a request, as vLLM's benchmark counts: tokens that arrive
        together came with one."""
        return [
            later[0] - earlier[0]
            for arrivals in self.arrivals
            for earlier, later in itertools.pairwise(arrivals)
        ]

    @property
    def decode_tokens_per_second(self) -> float:
        """Of the whole batch: tokens that arrived after the first did, over the time from the
        first to the last.

        Raises:
            ValueError: all tokens arrived at once.
        """
        flat = [arrival for arrivals in self.arrivals for arrival in arrivals]
        first, last = min(flat)[0], max(flat)[0]
        if last <= first:
            raise ValueError("all tokens arrived in one step; ask for more --tokens")
        return sum(count for when, count in flat if when > first) / (last - first)


def stream(
    llm,
    prompts: list[list[int]],
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    passes: PassTimes | None = None,
) -> Streamed:
    """Decodes a batch past any end-of-sequence token.

    Args:
        seed: of the process's generators; requests have none of their own, which would take
            another way through vLLM's sampler.
    """
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p if temperature else 1.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    names = [f"bench-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    found = Streamed([[] for _ in prompts], [[] for _ in prompts], [0] * len(prompts))
    place = {name: i for i, name in enumerate(names)}
    began = time.perf_counter()
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - began
        found.num_steps += 1
        for output in outputs:
            i, new = place[output.request_id], output.outputs[0].token_ids
            if new:
                found.token_ids[i] += new
                found.arrivals[i].append((now, len(new)))
            found.num_cached_tokens[i] = output.num_cached_tokens or 0
        if passes is not None and any(found.arrivals):
            found.marks.append(Mark(now, passes.seconds, passes.num_passes))
    found.seconds = now
    return found
