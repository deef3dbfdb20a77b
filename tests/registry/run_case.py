"""Runs the diff's own tests, then an engine, on a patched vLLM; prints what it saw as JSON.

``python -m tests.registry.run_case FOLDER`` with the patched vLLM first on PYTHONPATH.
"""

import gc
import sys
from pathlib import Path

import pytest

from tests.child import say
from tests.conftest import ENGINE
from tests.models import PAIR, PROMPTS


def main() -> None:
    folder = Path(sys.argv[1])
    own_tests = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder / "tests")]
    )
    import vllm

    results = {"vllm": vllm.__file__, "own_tests": int(own_tests), **run_engines()}
    say(results)


def run_engines() -> dict:
    """Compare greedy tokens of stock vLLM and of TriForce as a registered method."""
    from transformers import AutoTokenizer
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from tests.generation import generate
    from tests.registry.registered_triforce import register

    register()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    text = tokenizer((PROMPTS / "held_out.txt").read_text()[:8000])["input_ids"]
    arguments = {**ENGINE, "max_model_len": 1024, "skip_tokenizer_init": True}
    target = str(PAIR / "target")
    stock = LLM(target, **arguments)
    wanted = generate(stock, [text[:600], text[:200]], max_tokens=24)
    keys = {"retrieval_budget": 128, "retrieval_recent_tokens": 64, "min_context": 0}
    llm = LLM(target, speculative_config={"method": "triforce", "method_config": keys}, **arguments)
    found = generate(llm, [text[:600], text[:200]], max_tokens=24)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    counters = worker.model_runner.drafter.counters
    del stock
    gc.collect()
    return {
        "same": found == wanted,
        "worker": type(worker).__name__,
        "wrapped": hasattr(EngineArgs, "_triforce_patches"),
        "num_lookahead_tokens": llm.llm_engine.vllm_config.num_lookahead_tokens,
        "num_proposals": counters.num_proposals,
        "num_accepted": counters.num_level2_accepted,
    }


if __name__ == "__main__":
    main()
