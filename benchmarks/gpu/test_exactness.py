"""Promise: on each attention backend greedy outputs are stock vLLM's, sampled ones the target's.

Greedy tokens are equal, or part where stock's log-probabilities of both are closer to its best than
two roundings of a logit. Sampled tokens follow the target's distribution, by two chi-square tests
against transformers in float64. With the KV cache in host memory the same holds.
"""

import importlib.util

import pytest
import torch

from benchmarks.gpu.engines import decode, make_engine, release
from tests.asked import sampled_from
from tests.calibration import frequency_p_value, transform_p_value
from tests.models import PAIR, PROMPTS, make_llama
from vllm_triforce.metrics.report import counters_of

BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32", "FLASHINFER": "bfloat16"}
# Two roundings of a logit up to 16: closer ones may be ordered either way.
MARGIN = {"float32": 2e-4, "bfloat16": 2 * 2**-4}
# Random weights have ties of more than two tokens.
NUM_BEST = 8
MIN_P_VALUE = 1e-4
SAMPLING = {"T1": {"temperature": 1.0}, "T0.6-top-p": {"temperature": 0.6, "top_p": 0.9}}

FIXED = {"retrieval_budget": 512, "min_context": 0, "adaptive": False}
DRAFT = {"model": str(PAIR / "draft")}
OFFLOAD = {"kv_offload_gib": 2.0}
# Model and keys of each variant; "plain" ones need not draft.
VARIANTS = {
    "lookup": ("mha", FIXED),
    "draft": ("mha", FIXED | DRAFT),
    "adaptive-plain": ("mha", {"retrieval_budget": 512}),
    "gqa": ("gqa", FIXED | {"gamma": 1}),
    "offload-draft": ("mha", FIXED | DRAFT | OFFLOAD),
    "offload-plain": ("mha", OFFLOAD | {"levels": "3"}),
}
CASES = [
    pytest.param(
        backend, variant, id=f"{backend.replace('_ATTN', '') if offload else backend}-{variant}"
    )
    for backend in BACKENDS
    for variant in VARIANTS
    for offload in ["offload" in variant]
    if not (offload and backend != "FLASH_ATTN")
    # FLASHINFER has no heads of 32, which the draft has.
    if not ("draft" in variant and backend == "FLASHINFER")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """The embedded target, a random one with grouped queries, and one of eight tokens."""
    folder = tmp_path_factory.mktemp("models")
    grouped = dict(num_heads=8, num_kv_heads=2, head_dim=64, std=0.05, query_scale=4)
    eight = dict(vocab_size=8, num_kv_heads=2, head_dim=64, std=0.15, query_scale=1.5)
    return {
        "mha": str(PAIR / "target"),
        "gqa": make_llama(folder / "gqa", **grouped),
        "eight": make_llama(folder / "eight", **eight),
    }


@pytest.fixture(scope="module")
def stock_answers(models, sizes):
    """Stock vLLM's greedy answers with its best log-probabilities, by backend and model."""
    answers: dict[tuple, list[list]] = {}

    def get(backend: str, model: str) -> list[list]:
        key = (backend, model)
        if key not in answers:
            llm = _engine(models[model], None, backend, sizes)
            prompts = _prompts(model, models[model], sizes)
            answers[key] = [
                decode(llm, prompts[:batch], sizes.num_tokens, logprobs=NUM_BEST)
                for batch in sizes.batches
            ]
            release(llm)
        return answers[key]

    return get


def _engine(model: str, keys: dict | None, backend: str, sizes):
    return make_engine(
        model,
        keys,
        sizes.is_small,
        backend,
        dtype=BACKENDS[backend],
        max_model_len=max(1024, sizes.context + sizes.num_tokens + 64),
        max_num_seqs=max(4, *sizes.batches),
    )


def _prompts(name: str, model: str, sizes) -> list[list[int]]:
    """Prompts of different lengths: held-out text, or random tokens without a tokenizer."""
    lengths = [sizes.context - 37 * i for i in range(max(sizes.batches))]
    if name == "mha":
        from transformers import AutoTokenizer

        text = (PROMPTS / "held_out.txt").read_text()
        token_ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
        return [token_ids[500 * i :][:n] for i, n in enumerate(lengths)]
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 4096, (n,), generator=draw).tolist() for n in lengths]


def _skip_if_missing(backend: str) -> None:
    if backend == "FLASHINFER" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")


def difference(stock, token_ids: list[int], margin: float) -> str | None:
    """Describe where an answer parts from stock vLLM's beyond rounding; None if it does not.

    Args:
        stock: stock's answer, with the ``NUM_BEST`` best log-probabilities of each token.
        margin: largest distance of log-probabilities that rounding may exchange.
    """
    wanted, token_ids = list(stock.token_ids), list(token_ids)
    if len(wanted) != len(token_ids):
        return f"{len(token_ids)} tokens, stock has {len(wanted)}"
    place = next((i for i, (a, b) in enumerate(zip(wanted, token_ids)) if a != b), None)
    if place is None:
        return None
    logprobs = {token: entry.logprob for token, entry in stock.logprobs[place].items()}
    best = max(logprobs.values())
    close = {token for token, logprob in logprobs.items() if best - logprob <= margin}
    if {wanted[place], token_ids[place]} <= close:
        print(f"parted at token {place}, within rounding: {best - logprobs[token_ids[place]]:.3g}")
        return None
    return f"token {place} is {token_ids[place]}, stock's {wanted[place]}; its best: {logprobs}"


@pytest.mark.parametrize("backend, variant", CASES)
def test_greedy_outputs_are_stocks(models, stock_answers, sizes, backend, variant):
    _skip_if_missing(backend)
    model, keys = VARIANTS[variant]
    if "offload" in variant:
        _skip_offload_on_cpu()
    expected = stock_answers(backend, model)
    prompts = _prompts(model, models[model], sizes)
    llm = _engine(models[model], keys, backend, sizes)
    differences = []
    for batch, stock in zip(sizes.batches, expected):
        answers = decode(llm, prompts[:batch], sizes.num_tokens)
        for request, (ours, theirs) in enumerate(zip(answers, stock)):
            found = difference(theirs, ours.token_ids, MARGIN[BACKENDS[backend]])
            differences += [f"batch {batch}, request {request}: {found}"] if found else []
    counters = counters_of(llm)
    release(llm)
    assert not differences, "\n".join(differences)
    assert counters.num_level2_drafted > 0 or variant.endswith("plain")
    assert (counters.num_staged_bytes > 0) == ("offload" in variant)


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize(
    "backend, more",
    [*((name, {}) for name in BACKENDS), ("FLASH_ATTN", OFFLOAD)],
    ids=[*BACKENDS, "FLASH-offload"],
)
def test_samples_follow_the_targets_distribution(models, sizes, backend, more, params):
    from transformers import LlamaForCausalLM

    _skip_if_missing(backend)
    if more:
        _skip_offload_on_cpu()
    keys = {"retrieval_budget": 160, "num_speculative_tokens": 4, "retrieval_recent_tokens": 64}
    keys |= {"min_context": 0, "adaptive": False, **more}
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(8, (n,), generator=draw).tolist() for n in (400, 300, 350, 390)]
    llm = _engine(models["eight"], keys, backend, sizes)
    answers = [
        list(answer.token_ids) for answer in decode(llm, prompts, sizes.num_samples, **params)
    ]
    num_drafted = counters_of(llm).num_level2_drafted
    release(llm)
    target = LlamaForCausalLM.from_pretrained(models["eight"]).double()
    probs = []
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            logits = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        probs.append(sampled_from(logits, params))
    tokens = torch.tensor([token for answer in answers for token in answer])
    p_values = [test(torch.cat(probs), tokens) for test in (frequency_p_value, transform_p_value)]
    assert min(p_values) > MIN_P_VALUE and num_drafted > 0


def _skip_offload_on_cpu() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        pytest.skip("Model Runner V1 keeps its KV cache in one piece of memory")
