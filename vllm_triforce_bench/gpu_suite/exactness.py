"""Greedy and sampled output of TriForce against stock vLLM, on one attention backend.

Greedy tokens are the same, or part where stock's own two best log-probabilities are closer than
the rounding of the logits. Sampled tokens follow the target's own distribution, by two
chi-square tests against transformers in float64.
"""

import argparse
import gc
import importlib.util
import json
import tempfile
from pathlib import Path

import torch

from vllm_triforce_bench.gpu_suite.engine import decode, make_engine

# Two roundings of a logit of at most 16: what is closer may be ordered either way.
MARGIN = {"float32": 2e-4, "float16": 2 * 2**-7, "bfloat16": 2 * 2**-4}
LEAST_P_VALUE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="as vLLM names it; left out: vLLM's choice")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-samples", type=int, default=160, help="tokens of each of 4 requests")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    if args.backend == "FLASHINFER" and importlib.util.find_spec("flashinfer") is None:
        args.result.write_text(json.dumps({"skipped": "flashinfer is not installed"}))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {"greedy": greedy(args, Path(folder)), "sampling": sampling(args, Path(folder))}
    found["ok"] = all(case["ok"] for part in found.values() for case in part)
    args.result.write_text(json.dumps(found))
    print(json.dumps(found, indent=1))
    raise SystemExit(0 if found["ok"] else 1)


def _backend(args) -> dict:
    return {"attention_backend": args.backend} if args.backend else {}


_CHOSEN = "mha, lookup, chosen"


def greedy(args, folder: Path) -> list[dict]:
    """The embedded pair (MHA) with a draft and without, and a random model with GQA 4."""
    from tests.models import PAIR, make_llama

    gqa = make_llama(
        folder / "gqa", num_heads=8, num_kv_heads=2, head_dim=64, std=0.05, query_scale=4
    )
    target, draft = str(PAIR / "target"), str(PAIR / "draft")
    budget = {"retrieval_budget": 512, "min_context": 0, "adaptive": False}
    cases = []
    # What is chosen depends on what passes take there: it may be to propose nothing.
    variants_of_pair = {"mha, lookup": budget, _CHOSEN: {"retrieval_budget": 512}}
    if args.backend != "FLASHINFER":  # it has no heads of 32, which the draft has
        variants_of_pair["mha, draft"] = budget | {"model": draft}
    for model, variants in (
        (target, variants_of_pair),
        (gqa, {"gqa, lookup": budget | {"gamma": 1}}),
    ):
        prompts = _prompts(model, args)
        stock = _engine(args, model, None)
        wanted = {b: decode(stock, prompts[:b], args.num_tokens).token_ids for b in args.batches}
        for name, keys in variants.items():
            llm = _engine(args, model, keys)
            for b in args.batches:
                found = decode(llm, prompts[:b], args.num_tokens)
                case = _compare(stock, prompts[:b], wanted[b], found.token_ids, args.dtype)
                counters = found.counters.to_dict()
                case |= {"case": name, "batch": b, "counters": counters}
                case["ok"] &= counters["num_level2_drafted"] > 0 or name == _CHOSEN
                cases.append(case)
            del llm
            gc.collect()
        # An engine that goes takes vLLM's parallel groups of the process along: the next is made
        # after it, never before.
        del stock
        gc.collect()
    return cases


def _engine(args, model: str, keys: dict | None):
    return make_engine(
        model,
        args.device,
        keys,
        dtype=args.dtype,
        max_model_len=args.context + args.num_tokens + 64,
        max_num_seqs=max(args.batches),
        **({"gpu_memory_utilization": 0.2} if args.device != "cpu" else {}),
        **_backend(args),
    )


def _prompts(model: str, args) -> list[list[int]]:
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


def _compare(stock, prompts, wanted, found, dtype: str) -> dict:
    case = {"num_requests": len(prompts), "num_same": 0, "parted": [], "ok": True}
    for prompt, a, b in zip(prompts, wanted, found):
        if a == b:
            case["num_same"] += 1
            continue
        place = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
        best = _two_best(stock, prompt + a[:place])
        margin = best[0][1] - best[1][1]
        fine = {a[place], b[place]} == {best[0][0], best[1][0]} and margin <= MARGIN[dtype]
        case["parted"].append({"place": place, "margin": margin, "within_rounding": fine})
        case["ok"] &= fine
    return case


def _two_best(stock, prompt: list[int]) -> list[tuple[int, float]]:
    from vllm import SamplingParams

    output = stock.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False),
        use_tqdm=False,
    )[0].outputs[0]
    best = [(token, entry.logprob) for token, entry in output.logprobs[0].items()]
    return sorted(best, key=lambda item: -item[1])[:2]


def sampling(args, folder: Path) -> list[dict]:
    """A target with eight tokens, so that a few hundred samples say something."""
    from tests.models import make_llama

    target = make_llama(
        folder / "tiny", vocab_size=8, num_kv_heads=2, head_dim=64, std=0.15, query_scale=1.5
    )
    keys = {"retrieval_budget": 160, "num_speculative_tokens": 4, "min_context": 0}
    keys["adaptive"] = False
    llm = make_engine(
        target,
        args.device,
        keys | {"retrieval_recent_tokens": 64},
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=4,
        **({"gpu_memory_utilization": 0.2} if args.device != "cpu" else {}),
        **_backend(args),
    )
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(8, (n,), generator=draw).tolist() for n in (400, 300, 350, 390)]
    return [
        _sampled(llm, target, prompts, args.num_samples, own)
        for own in ({"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9})
    ]


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
    return {"params": own, "p_values": p_values, "counters": counters, "ok": ok}


if __name__ == "__main__":
    main()
