"""Sampling on Model Runner V2 with TriForce: what distribution comes out; run by run_case.py."""

import dataclasses
import gc
import tempfile
from pathlib import Path

import torch

from tests.generation import generate
from tests.models import make_llama
from tests.v2.calibration import frequency_p_value, processed, transform_p_value
from tests.v2.engine import make_engine, speculator_of, uninformed_scheduler
from vllm_triforce.device import levels as loop

VOCAB_SIZE = 8
PROMPT_LENGTHS = (400, 300, 350, 390)
# Level 2 reads 160 tokens of up to 600: it must be wrong at times.
KEYS = {
    "retrieval_budget": 160,
    "num_speculative_tokens": 4,
    "gamma": 2,
    "num_recent_tokens": 60,
    "prompt_lookup_max": 4,
}


def run() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        target = make_llama(
            Path(folder) / "target",
            vocab_size=VOCAB_SIZE,
            num_kv_heads=2,
            std=0.15,
            query_scale=1.5,
        )
        draft = make_llama(
            Path(folder) / "draft", vocab_size=VOCAB_SIZE, num_layers=1, std=0.1, seed=1
        )
        return _all_cases(target, draft)


def _all_cases(target: str, draft: str) -> dict:
    results = {}
    oracle = Oracle(target)

    llm = make_engine(target, KEYS | {"model": draft})
    plain = dict(temperature=1.0)
    results["draft_t1"] = oracle.check(llm, [plain] * 4, 60)
    with uninformed_scheduler(llm):
        # Most requests pass min_context on the way: what comes before is all padding.
        limited = dataclasses.replace(speculator_of(llm).config, min_context=400)
        speculator_of(llm).config = limited
        results["padded"] = oracle.check(llm, [plain, plain, dict(temperature=0.6), plain], 60)
    seeded = [generate(llm, [oracle.prompts[0]], temperature=1.0, seed=7)[0] for _ in range(2)]
    results["seed_reproduces"] = seeded[0] == seeded[1]
    del llm
    gc.collect()

    llm = make_engine(target, KEYS)
    narrow = dict(temperature=0.6, top_p=0.9)
    results["lookup_narrow"] = oracle.check(llm, [narrow] * 4, 60)
    various = [
        dict(temperature=1.3, top_k=5),
        dict(temperature=0),
        narrow,
        dict(temperature=1.0, seed=11),
    ]
    results["various"] = oracle.check(llm, various, 50)
    # The test must be able to fail.
    exact = loop.export_distributions

    def sharpened(handed_up, rows, target, *rest):
        exact(handed_up, rows, target * 5, *rest)

    loop.export_distributions = sharpened
    results["wrong_temperature"] = oracle.check(llm, [narrow] * 4, 60)
    loop.export_distributions = exact
    del llm
    gc.collect()

    # Level 2 reads what level 3 reads: if the distribution handed up, and read back by the
    # rejection sampler, is level 2's own, every token is accepted.
    llm = make_engine(target, KEYS | {"retrieval_budget": 1024})
    results["full_budget"] = oracle.check(llm, various, 34)
    return results


class Oracle:
    """The target in transformers: distributions of every token, in one pass."""

    def __init__(self, target: str) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(target).double()
        draw = torch.Generator().manual_seed(3)
        self.prompts = [
            torch.randint(VOCAB_SIZE, (n,), generator=draw).tolist() for n in PROMPT_LENGTHS
        ]

    def check(self, llm, params: list[dict], num_tokens: int) -> dict:
        """p-values of the sampled tokens and whether greedy ones are the target's best."""
        from tests.v2.engine import worker_of

        before = dataclasses.replace(speculator_of(llm).counters)
        before.time_seconds = dict(before.time_seconds)
        tokens = _generate_together(llm, self.prompts, params, num_tokens)
        spent = speculator_of(llm).counters.since(before)
        probs, sampled, greedy_right = [], [], True
        for prompt, new, own in zip(self.prompts, tokens, params):
            logits = self._logits(prompt, new)
            if own["temperature"] == 0:
                short_of_best = logits.amax(-1) - logits[range(len(new)), new]
                greedy_right &= bool((short_of_best < 1e-4).all())
                continue
            own = {key: value for key, value in own.items() if key != "seed"}
            probs.append(processed(logits, **own))
            sampled.append(torch.tensor(new))
        probs, sampled = torch.cat(probs), torch.cat(sampled)
        assert worker_of(llm).use_v2_model_runner
        return {
            "num_tokens": len(sampled),
            "least_prob": float(probs.gather(1, sampled[:, None]).min()),
            "frequency": frequency_p_value(probs, sampled),
            "transform": transform_p_value(probs, sampled),
            "greedy_right": greedy_right,
            "level2_acceptance_rate": spent.level2_acceptance_rate,
            "level1_acceptance_rate": spent.level1_acceptance_rate,
            "num_steps": spent.num_level3_steps,
        }

    @torch.no_grad()
    def _logits(self, prompt: list[int], new: list[int]) -> torch.Tensor:
        logits = self._model(torch.tensor([prompt + new])).logits[0]
        return logits[len(prompt) - 1 : -1]


def _generate_together(llm, prompts, params, num_tokens) -> list[list[int]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **own)
            for own in params
        ],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]
