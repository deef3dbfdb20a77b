"""One batch through one engine, step by step, with the time of every output."""

import itertools
import random
import time
from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind, SamplingParams


@dataclass
class Streamed:
    """Outputs by request; times are seconds since the batch was added.

    Args:
        arrivals: for each request, time and number of tokens of outputs with tokens.
        num_cached_tokens: prompt tokens in the prefix cache.
    """

    token_ids: list[list[int]]
    arrivals: list[list[tuple[float, int]]]
    num_cached_tokens: list[int] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def time_to_first_token_s(self) -> list[float]:
        return [arrivals[0][0] for arrivals in self.arrivals]

    @property
    def inter_token_latency_s(self) -> list[float]:
        """Times between two outputs of a request, as ``vllm bench serve`` counts."""
        return [
            later[0] - earlier[0]
            for arrivals in self.arrivals
            for earlier, later in itertools.pairwise(arrivals)
        ]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of the batch after the first, over the time from the first to the last.

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
) -> Streamed:
    """Decode a batch past any end-of-sequence token.

    Args:
        seed: seed of the process's generators. Requests have no seeds: they would take another
            way through vLLM's sampler.
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
        detokenize=False,
    )
    engine = llm.llm_engine
    names = [f"bench-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    index = {name: i for i, name in enumerate(names)}
    streamed = Streamed([[] for _ in prompts], [[] for _ in prompts], [0] * len(prompts))
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin
        streamed.num_steps += 1
        for output in outputs:
            i, token_ids = index[output.request_id], output.outputs[0].token_ids
            if token_ids:
                streamed.token_ids[i] += token_ids
                streamed.arrivals[i].append((now, len(token_ids)))
            streamed.num_cached_tokens[i] = output.num_cached_tokens or 0
    streamed.seconds = now
    return streamed
