"""A machine and a text: what passes take, and how much of a proposal is accepted."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import torch

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core import calibration
from vllm_triforce.runner_v2.calibration import CalibrationV2

# Sizes of vLLM's CUDA graphs, in tokens: a pass computes as many as the graph that it fits.
_GRAPHS = [1, 2, 4, *range(8, 513, 8)]


@dataclass
class Machine:
    """Seconds, by arithmetic: bytes over bandwidth, operations over throughput, launches."""

    weights: float
    """To read the target's weights once, and to launch what a pass launches."""
    per_kv: float
    """To read a token's keys and values in all layers."""
    per_token: float = 10e-6
    """That a token adds to a pass that is bound by reading weights."""
    per_prompt_token: float = 30e-6
    """Of a pass that is bound by computing."""
    per_query: float = 0.04
    """Share of the context's reading that each token more of a request adds."""
    alone: float = 1.0
    """Factor on the context's reading in a pass of several tokens of a single request, where the
    kernel spreads it over the machine for single tokens only; it fades with more requests."""
    level2_own: float = 0.0005
    """Of a pass of level 2, beside what any pass takes: copies around attention."""
    selecting: float = 0.00025
    """Of a selection, in every second round; ..."""
    per_chunk_token: float = 6.5e-9
    """... and of each token of the longest context, through which it searches."""
    per_mean_key: float = 1e-9
    """To read the mean keys of a token of context, of each request."""
    draft: float = 0.0004
    """A pass of the draft."""
    draft_per_row: float = 4e-6
    selection: float = 2e-9
    """That a first selection takes for a token of context."""
    begin: float = 0.0002
    """Of any proposal: kernels beside the passes, which calibration by differences cannot see."""
    beside: float = 0.0003
    """Of any step: sampling and inputs."""
    verifying: float = 0.0001
    """Of a step that verifies anything: the rejection sampler's kernels."""
    no_graph: float = 0.0015
    """Of a pass that no graph fits."""
    serves_any_mix: bool = True
    """Whether graphs serve any mix of 1 to ``longest`` tokens, as where ``varlen_decode`` can be;
    else those of equal numbers alone, single tokens or ``longest``."""
    longest: int = 13
    scheduling: float = 0.0003
    """The host's, for a step; beside the device's where scheduling is asynchronous."""

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int], num_prompt: int = 0):
        """
        Args:
            tokens, contexts: of each request that decodes.
            num_prompt: further tokens, of prompts.
        """
        total = sum(tokens) + num_prompt
        kinds = set(tokens)
        is_uniform = len(kinds) == 1 and kinds <= {1, self.longest}
        has_graph = total <= _GRAPHS[-1] and not num_prompt
        has_graph &= is_uniform or self.serves_any_mix
        if has_graph:
            total = _GRAPHS[bisect_left(_GRAPHS, total)]
        seconds = max(self.weights + self.per_token * total, self.per_prompt_token * total)
        spread = 1 + (self.alone - 1) / max(1, len(tokens))
        for count, context in zip(tokens, contexts):
            reading = self.per_kv * context * (1 + self.per_query * (count - 1))
            seconds += reading * (spread if count > 1 else 1.0)
        return seconds + (0.0 if has_graph else self.no_graph)

    def level2(self, contexts: Sequence[int], num_tokens: int) -> float:
        tokens = _GRAPHS[bisect_left(_GRAPHS, len(contexts) * num_tokens)]
        read = sum(min(4096, max(512, context // 8), context) for context in contexts)
        return self.weights + self.level2_own + self.per_token * tokens + read * self.per_kv

    def selections(self, contexts: Sequence[int], num_rounds: int) -> float:
        once = self.selecting + self.per_chunk_token * max(contexts)
        return -(-num_rounds // 2) * (once + self.per_mean_key * sum(contexts))

    def drafting(self, num_rows: int, num_passes: int) -> float:
        return num_passes * (self.draft + self.draft_per_row * (num_rows - 1))

    def proposing(self, route: str, contexts: Sequence[int], num_rounds: int, gamma: int) -> float:
        """Of requests that go by the same route together."""
        if route == "prompt_lookup":
            return self.begin
        seconds = self.begin + self.drafting(len(contexts), num_rounds * gamma)
        if route == HIERARCHICAL:
            seconds += num_rounds * self.level2(contexts, gamma + 1)
            seconds += self.selections(contexts, num_rounds)
        return seconds

    def measured(self, config, max_context: int, max_reqs: int) -> Measurements:
        """What the worker's own calibration finds at start-up, on the simulated clock."""
        clock = SimpleNamespace(now=0.0)

        def dummy_run(num_tokens: int, uniform_decode: bool, context_len: int) -> None:
            length = config.num_speculative_tokens + 1 if uniform_decode else 1
            count = num_tokens // length
            clock.now += self.full_pass([length] * count, [context_len] * count)

        def propose(route, batch, draft_tokens) -> None:
            contexts = [batch.context] * batch.rows
            clock.now += self.proposing(route, contexts, batch.rounds, config.gamma)
            clock.now += self.selection * batch.context * batch.rows * (route == HIERARCHICAL)

        batches = SimpleNamespace(
            max_rows=min(max_reqs, config.max_speculating_seqs),
            make=lambda rows, context, tokens, rounds, is_greedy: SimpleNamespace(
                rows=rows, context=context, rounds=rounds, num_sampled=None
            ),
            forget=lambda batch: None,
            device=torch.device("meta"),  # not the CPU, where little is measured
        )
        triforce = SimpleNamespace(
            begin=lambda *_: None,
            count_full_pass=lambda *_: None,
            end=lambda *_: None,
            propose=propose,
            keeps_window=lambda route: route == "draft_model",
        )
        timer = SimpleNamespace(perf_counter=lambda: clock.now)
        synchronize = patch.object(torch.accelerator, "synchronize", lambda: None)
        with patch.object(calibration, "time", timer), synchronize:
            return CalibrationV2(
                config,
                dummy_run,
                triforce,
                batches,
                max_context,
                max_reqs,
                max_tokens=8192,
                num_kv_tokens=500_000,
            ).run()


# An H200 with an 8B model of grouped heads, as measured (docs/results.md): steps of 6.5 and 9.2 ms
# at 32,000 and 122,000 tokens, passes of level 2 of 6.3 and 7.0 ms. By arithmetic: a 7B model with
# keys for each head, and the first on an A100 with FlashAttention 2. A draft of 68M parameters, or
# of 1B.
MACHINES = {
    "gqa": Machine(weights=0.0050, per_kv=33e-9),
    "mha": Machine(weights=0.0046, per_kv=131e-9, per_mean_key=4e-9),
    "gqa, large draft": Machine(weights=0.0050, per_kv=33e-9, draft=0.0012, draft_per_row=2e-5),
    "mha, large draft": Machine(
        weights=0.0046, per_kv=131e-9, per_mean_key=4e-9, draft=0.0012, draft_per_row=2e-5
    ),
    "gqa, FA2": Machine(
        weights=0.0100, per_kv=82e-9, per_token=25e-6, alone=2.0, serves_any_mix=False
    ),
    "mha, uniform graphs": Machine(
        weights=0.0046, per_kv=131e-9, per_mean_key=4e-9, serves_any_mix=False
    ),
}


@dataclass
class Text:
    """How often tokens are accepted by the level above.

    Args:
        level2: of level 2's, by the full pass.
        level1: of the draft's, by level 2.
        match: how often prompt lookup has something to propose, and ...
        lookup: ... how often such a token is accepted.
    """

    level2: float = 0.0
    level1: float = 0.0
    match: float = 0.3
    lookup: float = 0.0

    def of(self, request: str) -> "Text":
        return self


HOPELESS = Text()
TEXTS = {
    "hopeless": HOPELESS,
    "0.4, 0.3": Text(0.4, 0.3, lookup=0.1),
    "0.7, 0.5": Text(0.7, 0.5, lookup=0.3),
    "0.8, 0.5": Text(0.8, 0.5, lookup=0.3),
    "0.95, 0.7": Text(0.95, 0.7, lookup=0.5),
}


@dataclass
class World:
    machine: Machine
    text: Text
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def accepted(self, rate: float, count: int) -> int:
        """Of ``count`` tokens in a row."""
        return next((n for n in range(count) if self.draw.random() >= rate), count)
