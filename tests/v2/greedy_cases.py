"""Greedy decoding on Model Runner V2, with and without TriForce; run by run_case.py."""

import gc
import random
import tempfile
from pathlib import Path

from tests.generation import generate
from tests.models import PAIR, PROMPTS, make_architecture
from tests.v2.engine import make_engine, speculator_of, uninformed_scheduler, watch, worker_of
from vllm_triforce.selection import POLICIES

# 700 tokens are prefilled in three chunks, while the others decode.
MIXED = (700, 90, 400)
MIN_CONTEXT = 200
NUM_TOKENS = 14


def run() -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    text = tokenizer((PROMPTS / "held_out.txt").read_text()[:8000])["input_ids"]
    prompts = [text[:n] for n in MIXED]
    cramped = [text[start : start + 220] for start in (0, 100, 200, 300)]
    ends = [text[:n] for n in (1002, 1019, 1022)]

    stock = make_engine(str(PAIR / "target"))
    wanted = generate(stock, prompts, max_tokens=NUM_TOKENS)
    wanted_cramped = generate(stock, cramped, max_tokens=44)
    wanted_ends = [generate(stock, ends, max_tokens=m) for m in (1, 2, 4, 30)]
    del stock
    gc.collect()

    results: dict = {}
    for name, keys in (("draft", {"model": str(PAIR / "draft")}), ("lookup", {})):
        keys |= {"retrieval_budget": 128, "min_context": MIN_CONTEXT, "num_recent_tokens": 100}
        llm = make_engine(str(PAIR / "target"), keys)
        results[name] = _one_engine(llm, prompts, wanted)
        results[name]["ends"] = wanted_ends == [
            generate(llm, ends, max_tokens=m) for m in (1, 2, 4, 30)
        ]
        del llm
        gc.collect()
    for name in sorted(set(POLICIES) - {"retrieval"}):
        keys = {"selection": name, "retrieval_budget": 128, "min_context": MIN_CONTEXT}
        llm = make_engine(str(PAIR / "target"), keys)
        results[f"policy_{name}"] = {
            "same": generate(llm, prompts[::2], max_tokens=NUM_TOKENS) == wanted[::2],
            "counters": speculator_of(llm).counters.to_dict(),
        }
        del llm
        gc.collect()
    keys = {"model": str(PAIR / "draft"), "retrieval_budget": 1024}
    # Three requests start with 8 blocks of 32 tokens and come to want 9, of 26 that there are
    # (one is vLLM's null block).
    llm = make_engine(str(PAIR / "target"), keys, num_gpu_blocks_override=27, max_model_len=800)
    results["full_budget"] = _full_budget(llm, prompts[2], wanted[2])
    results["preemption"] = _preemption(llm, cramped, wanted_cramped)
    del llm
    gc.collect()
    results["windows"] = _windows()
    return results


def _windows() -> dict:
    """Layers with a sliding window, in a KV cache group of their own, stay dense at level 2."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 4000) for _ in range(n)] for n in (300, 120)]
    with tempfile.TemporaryDirectory() as folder:
        model = make_architecture(Path(folder) / "gemma3", "gemma3")
        stock = make_engine(model)
        wanted = generate(stock, prompts, max_tokens=16)
        results = {}
        for name, budget in (("small", 128), ("covering", 1024)):
            llm = make_engine(model, {"retrieval_budget": budget, "min_context": 50})
            results[name] = generate(llm, prompts, max_tokens=16) == wanted
            results[f"{name}_counters"] = speculator_of(llm).counters.to_dict()
            del llm
            gc.collect()
    return results


def _one_engine(llm, prompts, wanted) -> dict:
    alone = generate(llm, prompts[:1], max_tokens=NUM_TOKENS)
    announced: dict[str, list[int]] = {}
    handler = worker_of(llm).model_runner.draft_tokens_handler
    with watch(handler, "get_draft_tokens") as calls:
        mixed = generate(llm, prompts, max_tokens=NUM_TOKENS)
    for _, drafts in calls:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids):
            announced.setdefault(name, []).append(len(tokens))
    by_age = [announced[name] for name in sorted(announced, key=lambda n: int(n.split("-")[0]))]
    with uninformed_scheduler(llm):
        padded = generate(llm, prompts, max_tokens=NUM_TOKENS)
    speculator = speculator_of(llm)
    return {
        "alone": alone == wanted[:1],
        "mixed": mixed == wanted,
        "padded": padded == wanted,
        "announced": by_age,
        "counters": speculator.counters.to_dict(),
        "draft_layers_in_kv_cache": sum(
            name in group.layer_names
            for group in worker_of(llm).model_runner.kv_cache_config.kv_cache_groups
            for name in speculator.draft_layer_names
        ),
        "num_draft_layers": len(speculator.draft_layer_names),
    }


def _full_budget(llm, prompt, wanted) -> dict:
    found = generate(llm, [prompt], max_tokens=NUM_TOKENS)
    return {"same": found == [wanted], "counters": speculator_of(llm).counters.to_dict()}


def _preemption(llm, prompts, wanted) -> dict:
    """Some requests lose their blocks, and their place in the runner, and come back."""
    runner, speculator = worker_of(llm).model_runner, speculator_of(llm)
    with watch(runner, "finish_requests") as calls, watch(speculator, "propose") as proposals:
        found = generate(llm, prompts, max_tokens=44)
    slots = speculator._built.slots
    again = generate(llm, prompts[:1], max_tokens=44)
    return {
        "same": found == wanted and again == wanted[:1],
        "num_preempted": sum(len(args[0].preempted_req_ids or ()) for args, _ in calls),
        "num_steps": len(proposals),
        "known_at_end": len(slots),
        "num_free_slots": slots.num_free,
        "num_slots": speculator._built.num_slots,
    }
