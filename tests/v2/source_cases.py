"""Greedy decoding on Model Runner V2 with one source of drafts; run by run_case.py."""

import gc

from tests.generation import generate
from tests.models import PAIR, PROMPTS
from tests.v2.engine import make_engine, speculator_of
from vllm_triforce.config.draft_sources import SOURCES


def run(source: str) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    text = tokenizer((PROMPTS / "held_out.txt").read_text()[:4000])["input_ids"]
    prompts = [text[:300], text[:60] * 4, text[200:290]]
    stock = make_engine(str(PAIR / "target"))
    wanted = generate(stock, prompts, max_tokens=14)
    del stock
    gc.collect()
    keys = {"draft_sources": source, "retrieval_budget": 128}
    if SOURCES[source].needs_model:
        keys["model"] = str(PAIR / "draft")
    llm = make_engine(str(PAIR / "target"), keys)
    same = generate(llm, prompts, max_tokens=14) == wanted
    return {"same": same, "counters": speculator_of(llm).counters.to_dict()}
