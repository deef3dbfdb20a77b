"""What a prompt that comes late waits for beside requests that speculate, against stock vLLM.

python -m benchmarks.first_tokens

On Runner V1 the embedded pair, whose requests repeat themselves, so that prompt lookup predicts
them; on Runner V2 the device of ``tests/simulation``, in its seconds.
"""

import os
import time
from random import Random
from statistics import mean, median

os.environ.setdefault("VLLM_TRIFORCE_CHECK", "")  # as a server has it, not as tests have it

from vllm import SamplingParams

from tests.conftest import Engines
from tests.models import PAIR
from tests.simulation.loads import late_prompts

# Tokens of a step, and of the late prompt: read in several steps, or just in one.
STEPS = {256: 1000, 2048: 2000, 8192: 8100}


def in_engine(
    llm, num_running: int, prompt: int, repeats: int, seed: int = 0, num_emitted: int = 400
) -> list[tuple[int, float]]:
    """Return steps and seconds to the first token of each late prompt, one after another.

    A late prompt comes when the running requests have emitted the same number of tokens with
    speculation as without: a step's attention takes as long as their contexts are.

    Args:
        seed: of the prompts; a prompt that is read twice is in the prefix cache.
        num_emitted: tokens of each running request before the first late prompt, on average.
    """
    engine, draw = llm.llm_engine, Random(f"{prompt} {num_running} {seed}")

    def add(name: str, tokens: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": tokens}, params)

    def step() -> list[str]:
        outputs = engine.step()
        emitted.update({its.request_id: len(its.outputs[0].token_ids) for its in outputs})
        return [its.request_id for its in outputs]

    running = [f"running {n}" for n in range(num_running)]
    emitted = dict.fromkeys(running, 0)
    for name in running:
        add(name, [draw.randrange(3, 200) for _ in range(16)] * 8, 8000)
    found = []
    for n in range(repeats):
        while sum(emitted[name] for name in running) < (num_emitted + 80 * n) * num_running:
            step()
        add(f"late {n}", [draw.randrange(3, 200) for _ in range(prompt)], 2)
        start, num_steps = time.perf_counter(), 1
        while f"late {n}" not in step():
            num_steps += 1
        found.append((num_steps, time.perf_counter() - start))
    engine.abort_request(running)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def by_turns(engines: Engines, size: int, budget: int, prompt: int) -> list[list]:
    """Measure stock vLLM and TriForce one after the other, four times."""
    found: list[list] = [[], []]
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 40}
    for turn in range(4):
        for is_ours in (False, True) if turn % 2 == 0 else (True, False):
            keys = {"method": "triforce"} if is_ours else None
            llm = engines.get(str(PAIR / "target"), keys, **settings)
            found[is_ours] += in_engine(llm, size, prompt, 6, turn)
    return found


def main() -> None:
    engines = Engines()
    for budget, prompt in STEPS.items():
        for size in (8, 32):
            simulated = [late_prompts(is_ours, size, budget, prompt) for is_ours in (False, True)]
            for runner, both in (
                ("v1", by_turns(engines, size, budget, prompt)),
                ("v2", simulated),
            ):
                told = ""
                for name, found in zip(("stock", "TriForce"), both):
                    steps, seconds = zip(*found)
                    told += f"; {name} {mean(steps):5.2f} steps, {1e3 * median(seconds):7.1f} ms"
                where = f"{size:3} beside, {budget:5} tokens a step, prompt of {prompt:5}"
                print(f"{runner}: {where}{told}", flush=True)
        engines.clear()


if __name__ == "__main__":
    main()
