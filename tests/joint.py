"""The exact joint distribution of two speculated tokens, for tests of sampled output.

The oracle is independent: transformers' Llama gives the exact joint distribution of the first
tokens over a vocabulary of ``VOCAB``. Power: 6,000 completions; a chi-square test at p < 1e-4
over the joint of two tokens finds a total variation of about 0.06 between them, and the
reference's mistake (recovering from p2), put into the engine, must fail the same test.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.asked import sampled_from, shaped
from tests.fuzz.models import save_tokenizer
from tests.models import make_llama

VOCAB = 12
# The tokens behind bos and eos.
LETTERS = "abcdefghij"
NUM_SAMPLES = 6000
NUM_TOKENS = 4
SETTINGS = {"T=1": dict(temperature=1.0), "T=0.6": dict(temperature=0.6, top_p=0.9)}


def make_models(folder: Path) -> dict[str, str]:
    shape = dict(vocab_size=VOCAB, hidden_size=64, num_heads=4, num_kv_heads=2, std=0.09)
    target = make_llama(folder / "target", num_layers=2, query_scale=6, seed=3, **shape)
    draft = make_llama(folder / "draft", num_layers=1, seed=4, **shape)
    for made in (target, draft):
        save_tokenizer(made, LETTERS)
    return {"target": target, "draft": draft}


def make_prompt() -> list[int]:
    return torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()


def exact_logits(target: str, prompt: list[int]) -> dict[tuple[int, ...], np.ndarray]:
    """Compute the target's logits after the prompt and every continuation, by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    logits = {}
    with torch.no_grad():
        for depth in range(3):
            rests = list(itertools.product(range(VOCAB), repeat=depth))
            batch = torch.tensor([prompt + list(rest) for rest in rests])
            for chunk in range(0, len(rests), 48):
                out = model(batch[chunk : chunk + 48]).logits[:, -1].double().numpy()
                logits |= dict(zip(rests[chunk : chunk + 48], out))
    return logits


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def prompt():
    return make_prompt()


@pytest.fixture(scope="module")
def exact(models, prompt):
    return exact_logits(models["target"], prompt)


def asked_joint(exact, prompt: list[int], asked: Mapping) -> np.ndarray:
    """Return the distribution of the second and third token, [VOCAB, VOCAB]."""

    def after(prefix: tuple[int, ...]) -> np.ndarray:
        logits = torch.from_numpy(exact[prefix]).expand(len(prefix) + 1, -1)
        return sampled_from(shaped(logits, prompt, [*prefix, 0], asked), asked)[-1].numpy()

    joint = np.zeros((VOCAB, VOCAB))
    for a, p in enumerate(after(())):
        for b, q in enumerate(after((a,))):
            if p * q > 0:
                joint[b] += p * q * after((a, b))
    return joint


def sample(llm, prompt, count=NUM_SAMPLES, **params) -> np.ndarray:
    """Return completions of one prompt, [count, NUM_TOKENS]."""
    from vllm import SamplingParams

    from tests.outputs import run

    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **params)
    outputs = run(llm, [prompt] * count, params)
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
