"""Compare the controller's decisions with fixed ones in one engine, on Runner V1.

    python tools/decisions.py build/smollm2/mha --prompts FILE --context 7168 --lengths 4 8

In turns the same prompts are decoded plainly, with proposals of each fixed length, by a controller
as after the start (``first``), and by one that keeps what it learned (``later``). One engine does
it all, so that its start, its prefill and the machine's noise weigh less than in
``vllm-triforce bench``; stock vLLM is not among it. Ratios are to plain decoding in the same turn.
Preload vLLM's OpenMP as the Makefile does for ``make demo``.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.inside import controller_of
from vllm_triforce.controller import PLAIN, Choice, Controller
from vllm_triforce.controller.controller import describe
from vllm_triforce.controller.routes import LEVELS
from vllm_triforce.metrics.report import counters_of

# Steps of a rest between two decisions to decode plainly, as in the controller.
_REST = 32
# What the controller learns, as attributes.
_LEARNED = ("measured", "acceptance", "trials", "num_decisions", "_last_plain_step")


class Decider:
    """Replaces a controller's decisions, and what it has learned."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._choose, self._choose_draft = controller.choose, controller.choose_draft
        self._backoff = copy.deepcopy(controller.backoff.__dict__)
        self._fresh = self._state()
        self._later = self._fresh

    def use(self, policy: str) -> None:
        """Decide by a policy: ``plain``, a number of tokens, ``first`` or ``later``."""
        controller = self._controller
        controller.choose, controller.choose_draft = self._choose, self._choose_draft
        controller.backoff.__dict__.update(copy.deepcopy(self._backoff))
        self._restore(self._later if policy == "later" else self._fresh)
        if policy == "plain":
            controller.choose = self._decode_plainly
        elif policy.isdecimal():
            controller.choose = lambda reqs, num_plain=0: self._propose(reqs, int(policy))

    def end(self, policy: str) -> None:
        """Keep what ``later`` has learned."""
        if policy == "later":
            self._later = self._state()

    def _decode_plainly(self, candidates, num_plain=0) -> list[Choice]:
        self._controller.planned = None
        self._controller.backoff.begin(_REST)
        return [PLAIN] * len(candidates)

    def _propose(self, candidates, num_tokens: int) -> list[Choice]:
        self._controller.planned = None
        choices = [Choice(LEVELS, min(num_tokens, c.most)) for c in candidates]
        self._controller._chosen.update((c.request_id, x) for c, x in zip(candidates, choices))
        return choices

    def _state(self) -> dict:
        return copy.deepcopy({name: getattr(self._controller, name) for name in _LEARNED})

    def _restore(self, state: dict) -> None:
        controller, state = self._controller, copy.deepcopy(state)
        # Other objects hold this one.
        controller.acceptance.__dict__.update(state.pop("acceptance").__dict__)
        for name, value in state.items():
            setattr(controller, name, value)
        controller.start(controller.measured)


def decode(llm: LLM, prompts: list[list[int]], args, num_tokens: int, seed: int) -> float:
    """Return the decoded tokens a second of a batch, from its first outputs on."""
    torch.manual_seed(seed)
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    for row, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{row}", {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    start = end = 0.0
    count = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            end, tokens = time.perf_counter(), output.outputs[0].token_ids
            if output.request_id in started:
                count += len(tokens)
            elif tokens:
                started.add(output.request_id)
                start = end
    return count / (end - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target")
    parser.add_argument("--prompts", type=Path, required=True, help="a long text")
    parser.add_argument("--context", type=int, default=7168, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--lengths", nargs="+", default=["4", "8"], help="fixed proposals, tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answers", type=int, default=2, help="turns with the same prompts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--keys", type=json.loads, default={}, help="TriForce's keys, JSON")
    args = parser.parse_args()
    llm = LLM(
        args.target,
        speculative_config={"method": "triforce", **args.keys},
        dtype="float32",
        max_model_len=args.context + args.tokens + 64,
        max_num_seqs=max(2, args.batch),
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=args.batch * (3 << 29),
        distributed_executor_backend="uni",
    )
    controller = controller_of(llm)
    print(describe(controller), flush=True)
    decider = Decider(controller)
    text = llm.get_tokenizer()(args.prompts.read_text())["input_ids"]
    policies = ["plain", *args.lengths, "first", "later"]
    ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    for turn in range(args.turns):
        first = turn // args.answers * args.batch
        starts = [(first + row) * args.context for row in range(args.batch)]
        prompts = [text[start : start + args.context] for start in starts]
        if len(prompts[-1]) < args.context:
            parser.error(f"{args.prompts} has {len(text)} tokens; give a longer text or less turns")
        if turn % args.answers == 0:
            decider.use("plain")
            decode(llm, prompts, args, 4, seed=0)  # fills the prefix cache
        speeds = {}
        for policy in policies[turn % len(policies) :] + policies[: turn % len(policies)]:
            decider.use(policy)
            before = counters_of(llm)
            speeds[policy] = decode(llm, prompts, args, args.tokens, seed=turn)
            counted = counters_of(llm).since(before)
            decider.end(policy)
            print(
                f"turn {turn + 1} {policy:6} {speeds[policy]:6.2f} tokens/s, "
                f"{counted.num_proposals} proposals, {counted.num_direct_proposals} of them "
                f"direct, {counted.mean_acceptance_length:.2f} tokens a full pass",
                flush=True,
            )
        for policy in policies:
            ratios[policy].append(speeds[policy] / speeds["plain"])
    for policy, values in ratios.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{policy:6} {statistics.median(values):.2f}x ({spread})")


if __name__ == "__main__":
    main()
