"""Compiled engines one after the other, as JSON: ``python -m tests.engine.compiled_case JOBS``.

JOBS is JSON: a list of TriForce's keys, or null for stock vLLM, an engine each.
"""

import json
import os
import sys
from dataclasses import asdict

from tests.conftest import Engines  # first: it sets what vLLM reads when it is imported
from tests.generation import generate
from tests.models import PAIR, held_out_tokens

ENGINE = dict(enforce_eager=False, max_model_len=4096)
LENGTHS = (40, 700, 2000)


def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    text = held_out_tokens(AutoTokenizer.from_pretrained(PAIR / "target"), 6000)
    return [text[n : 2 * n] for n in LENGTHS]


def answers(llm) -> list[list[int]]:
    """Alone and together, greedy and sampled with one answer."""
    sampled = {"temperature": 1.0, "top_k": 1}
    alone = [generate(llm, [prompt], max_tokens=24)[0] for prompt in prompts()]
    return [*alone, *generate(llm, prompts(), max_tokens=24, **sampled)]


def main() -> None:
    from vllm.compilation.counter import compilation_counter

    from vllm_triforce.metrics.report import counters_of

    engines, found = Engines(keep=1), []
    for keys in json.loads(sys.argv[1]):
        before = compilation_counter.clone()
        begun = os.times()
        llm = engines.get(str(PAIR / "target"), keys, **ENGINE)
        answered = answers(llm)
        ended = os.times()
        counted = None if keys is None else counters_of(llm)
        found.append(
            {
                "tokens": answered,
                "compiled": compilation_counter.num_aot_compiles - before.num_aot_compiles,
                "counted": {} if keys is None else asdict(counted) | {"time_seconds": 0},
                "cpu_s": sum(ended[:4]) - sum(begun[:4]),
            }
        )
    print("RESULTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
