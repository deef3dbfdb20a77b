"""Greedy and sampled output of TriForce against stock vLLM, on one attention backend.

Greedy tokens are the same, or part where stock's own two best log-probabilities are closer than
the rounding of the logits. Sampled tokens follow the target's own distribution, by two
chi-square tests against transformers in float64.

A case is a model, a variant and a batch, or a way to sample; each is an item of the result. Engines
stand one after the other: what stock vLLM says, with its log-probabilities, is kept in the result.
"""

import argparse
import importlib.util
from functools import partial
from pathlib import Path

import torch

from vllm_triforce_bench.gpu_suite.engine import argument_parser, decode, make_engine
from vllm_triforce_bench.gpu_suite.items import Items
from vllm_triforce_bench.gpu_suite.state import write_json

# Two roundings of a logit of at most 16: what is closer may be ordered either way.
MARGIN = {"float32": 2e-4, "float16": 2 * 2**-7, "bfloat16": 2 * 2**-4}
LEAST_P_VALUE = 1e-4
# Over 100,000 tokens of the models here. Engines stand one after the other in a process, and what
# an earlier one still holds leaves room for it.
SMALL_CACHE = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
STOCK, CHOSEN, PLAIN = "stock", "lookup, chosen", "offloaded, plain"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-samples", type=int, default=160, help="tokens of each of 4 requests")
    parser.add_argument(
        "--offload", action="store_true", help="with the KV cache in host memory, stock's not"
    )
    args = parser.parse_args()
    if args.backend == "FLASHINFER" and importlib.util.find_spec("flashinfer") is None:
        write_json(args.result, {"skipped": "flashinfer is not installed"})
        return
    items = Items(args.result, is_compiled=not args.no_compile)
    if args.offload:
        offloaded(args, items)
    else:
        greedy(args, items)
        sampling(args, items, {})
    wrong = [name for name, item in items.found.items() if not item.get("ok", "error" not in item)]
    print(f"not right: {wrong}")
    raise SystemExit(int(bool(wrong)))


def greedy(args: argparse.Namespace, items: Items) -> None:
    """The embedded pair (MHA) with a draft and without, and a random model with GQA 4."""
    from tests.models import PAIR, make_llama

    gqa = make_llama(
        args.work / "models" / "gqa",
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        std=0.05,
        query_scale=4,
    )
    budget = {"retrieval_budget": 512, "min_context": 0, "adaptive": False}
    # What is chosen depends on what passes take there: it may be to propose nothing.
    of_pair = {"lookup": budget, CHOSEN: {"retrieval_budget": 512}}
    if args.backend != "FLASHINFER":  # it has no heads of 32, which the draft has
        of_pair["draft"] = budget | {"model": str(PAIR / "draft")}
    compare(args, items, "mha", str(PAIR / "target"), of_pair)
    compare(args, items, "gqa", gqa, {"lookup": budget | {"gamma": 1}})


def offloaded(args: argparse.Namespace, items: Items) -> None:
    """The same with the KV cache in host memory; stock vLLM has all of it on the device."""
    from tests.models import PAIR

    offload = {"kv_offload_gib": 2.0}
    draft = {"retrieval_budget": 512, "min_context": 0, "adaptive": False}
    draft |= {"model": str(PAIR / "draft")} | offload
    variants = {"offloaded, draft": draft, PLAIN: offload | {"levels": "3"}}
    compare(args, items, "mha", str(PAIR / "target"), variants)
    sampling(args, items, offload)


def compare(
    args: argparse.Namespace, items: Items, name: str, model: str, variants: dict[str, dict]
) -> None:
    """Of a model, every variant with every batch."""
    prompts = _prompts(model, args)
    sizes = {f"batch {n}": n for n in args.batches}

    def stock(llm, case: str) -> dict:
        size = sizes[case.rpartition(", ")[2]]
        decoded = decode(llm, prompts[:size], args.num_tokens, logprobs=2)
        return {"token_ids": decoded.token_ids, "best": decoded.best}

    def ours(variant: str, llm, case: str) -> dict:
        batch = case.rpartition(", ")[2]
        wanted = items.found[f"{name}, {STOCK}, {batch}"]
        if "error" in wanted:
            return {"error": "stock vLLM could not be asked"}
        decoded = decode(llm, prompts[: sizes[batch]], args.num_tokens)
        found = differences(wanted, decoded.token_ids, MARGIN[args.dtype])
        found["counters"] = decoded.counters.to_dict()
        found["ok"] &= found["counters"]["num_level2_drafted"] > 0 or variant.startswith(
            (CHOSEN, PLAIN)
        )
        found["ok"] &= (found["counters"]["num_staged_bytes"] > 0) == args.offload
        return found

    cases = [f"{name}, {STOCK}, {batch}" for batch in sizes]
    items.run_all(cases, lambda: _engine(args, model, None), stock)
    for variant, keys in variants.items():
        cases = [f"{name}, {variant}, {batch}" for batch in sizes]
        make = partial(_engine, args, model, keys)
        items.run_all(cases, make, partial(ours, variant))


def differences(wanted: dict, found: list[list[int]], margin: float) -> dict:
    """Where requests part from stock vLLM.

    Args:
        wanted: stock's ``token_ids``, and ``best``: for each token its best ones with their
            log-probabilities.
        margin: so close two of them may be ordered either way.
    """
    case: dict = {"num_requests": len(found), "num_same": 0, "parted": [], "ok": True}
    for a, best, b in zip(wanted["token_ids"], wanted["best"], found, strict=True):
        if a == b:
            case["num_same"] += 1
            continue
        place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if place is None:
            case["parted"].append({"lengths": [len(a), len(b)], "within_rounding": False})
            case["ok"] = False
            continue
        (first, high), (second, low) = best[place][:2]
        fine = {a[place], b[place]} == {first, second} and high - low <= margin
        case["parted"].append({"place": place, "margin": high - low, "within_rounding": fine})
        case["ok"] &= fine
    return case


def _engine(args: argparse.Namespace, model: str, keys: dict | None):
    return make_engine(
        model,
        args,
        keys,
        dtype=args.dtype,
        max_model_len=args.context + args.num_tokens + 64,
        max_num_seqs=max(args.batches),
        **SMALL_CACHE,
    )


def _prompts(model: str, args: argparse.Namespace) -> list[list[int]]:
    """Held-out text where there is a tokenizer, of lengths all different; else random tokens."""
    from tests.models import PROMPTS

    lengths = [args.context - 37 * i for i in range(max(args.batches))]
    if (Path(model) / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        text = AutoTokenizer.from_pretrained(model)((PROMPTS / "held_out.txt").read_text())
        ids = text["input_ids"]
        return [ids[500 * i :][:n] for i, n in enumerate(lengths)]
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 4096, (n,), generator=draw).tolist() for n in lengths]


WAYS = {
    "sampling, temperature 1": {"temperature": 1.0},
    "sampling, temperature 0.6, top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
}


def sampling(args: argparse.Namespace, items: Items, more: dict) -> None:
    """A target with eight tokens, so that a few hundred samples say something.

    Args:
        more: of TriForce's keys.
    """
    from tests.models import make_llama

    target = make_llama(
        args.work / "models" / "eight-tokens",
        vocab_size=8,
        num_kv_heads=2,
        head_dim=64,
        std=0.15,
        query_scale=1.5,
    )
    keys = {"retrieval_budget": 160, "num_speculative_tokens": 4, "min_context": 0}
    keys |= {"adaptive": False, "retrieval_recent_tokens": 64, **more}
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(8, (n,), generator=draw).tolist() for n in (400, 300, 350, 390)]
    items.run_all(
        list(WAYS),
        lambda: make_engine(
            target,
            args,
            keys,
            dtype=args.dtype,
            max_model_len=1024,
            max_num_seqs=4,
            **SMALL_CACHE,
        ),
        lambda llm, way: _sampled(llm, target, prompts, args.num_samples, WAYS[way]),
    )


def _sampled(llm, target: str, prompts, num_tokens: int, own: dict) -> dict:
    from transformers import LlamaForCausalLM

    from tests.calibration import frequency_p_value, processed, transform_p_value

    found = decode(llm, prompts, num_tokens, **own)
    model = LlamaForCausalLM.from_pretrained(target).double()
    probs, tokens = [], []
    for prompt, new in zip(prompts, found.token_ids):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        probs.append(processed(logits, **own))
        tokens.append(torch.tensor(new))
    probs, tokens = torch.cat(probs), torch.cat(tokens)
    p_values = [frequency_p_value(probs, tokens), transform_p_value(probs, tokens)]
    counters = found.counters.to_dict()
    ok = min(p_values) > LEAST_P_VALUE and counters["num_level2_drafted"] > 0
    return {"p_values": p_values, "counters": counters, "ok": ok}


if __name__ == "__main__":
    main()
