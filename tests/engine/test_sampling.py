"""Promise: through the whole engine, sampled tokens have exactly the target's distribution.

The oracle is independent: transformers' Llama gives the exact joint distribution of the first
tokens over a vocabulary of ``VOCAB``. Power: 6,000 completions; a chi-square test at p < 1e-4
over the joint of two tokens finds a total variation of about 0.06 between them, and the
reference's mistake (recovering from p2), put into the engine, must fail the same test.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from vllm import SamplingParams

from tests.conftest import triforce
from tests.engine.test_level2 import built
from tests.models import make_llama
from tests.unit.test_inner_verification import readable_distribution
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.verification import inner

pytestmark = pytest.mark.engine

VOCAB = 12
NUM_SAMPLES = 6000
NUM_TOKENS = 4
SETTINGS = {"T=1": dict(temperature=1.0), "T=0.6": dict(temperature=0.6, top_p=0.9)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    shape = dict(vocab_size=VOCAB, hidden_size=64, num_heads=4, num_kv_heads=2, std=0.09)
    target = make_llama(folder / "target", num_layers=2, query_scale=6, seed=3, **shape)
    draft = make_llama(folder / "draft", num_layers=1, seed=4, **shape)
    return {"target": target, "draft": draft}


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def exact(models, prompt):
    """Logits of the target after the prompt and after every continuation, by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(models["target"], dtype=torch.float32)
    logits = {}
    with torch.no_grad():
        for depth in range(3):
            rests = list(itertools.product(range(VOCAB), repeat=depth))
            batch = torch.tensor([prompt + list(rest) for rest in rests])
            for chunk in range(0, len(rests), 48):
                out = model(batch[chunk : chunk + 48]).logits[:, -1].double().numpy()
                logits |= dict(zip(rests[chunk : chunk + 48], out))
    return logits


def exact_joint(exact, temperature, top_p=1.0) -> np.ndarray:
    """[VOCAB, VOCAB], distribution of the second and third token (which are speculated)."""

    def after(prefix):
        return readable_distribution(exact[prefix], temperature, VOCAB, top_p, 0.0)

    joint = np.zeros((VOCAB, VOCAB))
    for a, p in enumerate(after(())):
        for b, q in enumerate(after((a,))):
            if p * q > 0:
                joint[b] += p * q * after((a, b))
    return joint


def sample(llm, prompt, count=NUM_SAMPLES, **params) -> np.ndarray:
    """[count, NUM_TOKENS] completions of one prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * count,
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **params),
        use_tqdm=False,
    )
    return np.array([output.outputs[0].token_ids for output in outputs])


def pvalue(samples: np.ndarray, joint: np.ndarray) -> float:
    counts = np.zeros_like(joint)
    np.add.at(counts, (samples[:, 1], samples[:, 2]), 1)
    expected = joint * len(samples)
    assert counts[joint == 0].sum() == 0, "sampled what top-p excludes"
    rare = expected < 5
    found = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(found[wanted > 0], wanted[wanted > 0]).pvalue


def speculating(engines, models, with_draft: bool):
    keys = triforce(
        num_speculative_tokens=3,
        retrieval_budget=96,
        retrieval_recent_tokens=32,
        num_sink_tokens=4,
        num_recent_tokens=28,
    )
    if with_draft:
        keys["model"] = models["draft"]
    return engines.get(models["target"], keys, max_model_len=512, max_num_seqs=64)


@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "lookup"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_tokens_have_the_targets_distribution(
    engines, models, prompt, exact, setting, with_draft
):
    llm = speculating(engines, models, with_draft)
    before = counters_of(llm)
    samples = sample(llm, prompt, **SETTINGS[setting])
    counted = counters_of(llm).since(before)
    # Rejections at both levels took part, or nothing was tested.
    assert 0.05 < counted.level2_acceptance_rate < 0.98
    assert 0.01 < counted.level1_acceptance_rate < 0.98
    assert pvalue(samples, exact_joint(exact, **SETTINGS[setting])) > 1e-4


# Penalties depend on what the request itself has sampled: the oracle is told.
REQUESTS = {
    "min_p": dict(temperature=1.0, min_p=0.2),
    "min_p, top_k": dict(temperature=0.8, min_p=0.05, top_k=6),
    "logit_bias": dict(temperature=1.0, logit_bias={3: 2.0, 5: -3.0}),
    "allowed": dict(temperature=0.9, allowed_token_ids=[1, 3, 4, 6, 8, 10]),
    "penalties": dict(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.9
    ),
    "bias and penalty": dict(temperature=1.0, repetition_penalty=2.0, logit_bias={4: 3.0, 7: -4.0}),
}
NUM_PER_REQUEST = 1500


def readable_request(logits: np.ndarray, prompt, sampled, params: dict) -> np.ndarray:
    """The distribution that a request asks for, written down as vLLM documents it."""
    logits = logits.copy()
    for token, bias in params.get("logit_bias", {}).items():
        logits[token] += bias
    for token in range(VOCAB):
        count = sampled.count(token)
        if count or token in prompt:
            penalty = params.get("repetition_penalty", 1.0)
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0) * bool(count)
    if allowed := params.get("allowed_token_ids"):
        logits[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
    settings = (params.get("top_k", VOCAB), 1.0, params.get("min_p", 0.0))
    return readable_distribution(logits, params["temperature"], *settings)


def test_other_parameters_in_one_batch(engines, models, prompt, exact):
    """min_p and logit_bias, which vLLM refuses beside any other speculation, and the rest: each
    request's tokens have the distribution that it asked for, whatever runs beside it. Power: of
    1,500 completions each, a total variation of about 0.12; excluded tokens are found at once."""
    llm = speculating(engines, models, True)
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, n=10, **request)
        for request in REQUESTS.values()
    ] * (NUM_PER_REQUEST // 10)
    before = counters_of(llm)
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    counted = counters_of(llm).since(before)
    assert 0.05 < counted.level2_acceptance_rate < 0.98
    for i, (name, request) in enumerate(REQUESTS.items()):
        samples = np.array(
            [o.token_ids for out in outputs[i :: len(REQUESTS)] for o in out.outputs]
        )
        assert len(samples) == NUM_PER_REQUEST
        joint = np.zeros((VOCAB, VOCAB))
        for a, p in enumerate(readable_request(exact[()], prompt, [], request)):
            for b, q in enumerate(readable_request(exact[(a,)], prompt, [a], request)):
                if p * q > 0:
                    joint[b] += p * q * readable_request(exact[(a, b)], prompt, [a, b], request)
        assert pvalue(samples, joint) > 1e-4, name


def test_the_references_mistake_is_caught(engines, models, prompt, exact, monkeypatch):
    """With the recovered token drawn from p2, the same test fails."""
    llm = speculating(engines, models, True)
    monkeypatch.setattr(inner, "residual", lambda target, draft, token: target)
    samples = sample(llm, prompt, temperature=1.0)
    assert pvalue(samples, exact_joint(exact, temperature=1.0)) < 1e-6


def test_seeds_are_reproducible_whatever_runs_beside(engines, models, prompt):
    llm = speculating(engines, models, True)
    params = dict(temperature=0.9, max_tokens=24, ignore_eos=True, detokenize=False)
    seeded = [SamplingParams(seed=seed, **params) for seed in range(6)]
    prompts = [{"prompt_token_ids": prompt[: 200 + 10 * i]} for i in range(6)]

    def run(chosen):
        outputs = llm.generate(
            [prompts[i] for i in chosen], [seeded[i] for i in chosen], use_tqdm=False
        )
        return {i: list(o.outputs[0].token_ids) for i, o in zip(chosen, outputs)}

    together = run(range(6))
    assert run(range(6)) == together
    assert len({tuple(tokens) for tokens in together.values()}) > 1


def test_greedy_beside_sampled(engines, models, prompt):
    """In one batch, the greedy requests still give stock's tokens."""
    stock = engines.get(models["target"], None, max_model_len=512, max_num_seqs=64)
    llm = speculating(engines, models, True)
    params = [
        SamplingParams(temperature=t, max_tokens=24, ignore_eos=True, detokenize=False)
        for t in (0, 1.0, 0, 0.6)
    ]
    prompts = [{"prompt_token_ids": prompt[: 250 + 10 * i]} for i in range(4)]
    found = llm.generate(prompts, params, use_tqdm=False)
    wanted = stock.generate(prompts, params, use_tqdm=False)
    for i in (0, 2):
        assert list(found[i].outputs[0].token_ids) == list(wanted[i].outputs[0].token_ids)
    assert built(llm).counters.num_level2_drafted > 0
