"""Promise: on Runner V1, what a request asks of its logits changes a draft's as vLLM's sampler
changes the full pass's behind the same tokens."""

import random

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_triforce.runner_v1.sampling import LogitsProcessing

VOCAB_SIZE = 23
ASKED: dict[str, dict] = {
    "penalties": dict(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.7),
    "repetition": dict(repetition_penalty=1.05),
    "negative": dict(frequency_penalty=-0.4, presence_penalty=-1.0),
    "words": dict(_bad_words_token_ids=[[9], [1, 2, 3], [2, 4], [1, 1]]),
    "bias": dict(logit_bias={3: 2.5, 8: -4.0}),
    "allowed": dict(allowed_token_ids=[1, 2, 4, 9]),
    "min_tokens": dict(min_tokens=6, stop_token_ids=[5, 11]),
    "words and tokens of a larger tokenizer": dict(
        _bad_words_token_ids=[[VOCAB_SIZE], [1, VOCAB_SIZE], [4]],
        repetition_penalty=1.2,
        frequency_penalty=0.1,
    ),
    "all": dict(
        repetition_penalty=0.8,
        presence_penalty=0.5,
        _bad_words_token_ids=[[2], [1, 4]],
        logit_bias={4: 9.0, 2: 30.0},
        allowed_token_ids=[1, 2, 4, 9, 11],
        min_tokens=4,
        stop_token_ids=[11],
    ),
}


def by_vllm(logits, params, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Process logits [vocab_size] behind ``output`` as vLLM's sampler does."""
    logits = logits.clone()[None]
    if allowed := params.allowed_token_ids:
        logits[:, [token for token in range(VOCAB_SIZE) if token not in allowed]] = -torch.inf
    apply_bad_words(logits, {0: params.bad_words_token_ids or []}, [output])
    if len(output) < params.min_tokens:
        logits[:, list(params.all_stop_token_ids)] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[:, token] += bias
    numbers = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    numbers = (torch.tensor([number]) for number in numbers)
    return apply_all_penalties(logits, torch.tensor([prompt]), *numbers, [output])[0]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_logits_are_shaped_as_behind_the_same_tokens_in_a_full_pass(asked):
    draw, params = random.Random(3), SamplingParams(**asked)
    for _ in range(40):
        # Of few tokens, so that words and repetitions come.
        prompt, output, new = (
            [draw.choice([1, 2, 4, 7, 9]) for _ in range(draw.randint(least, 6))]
            for least in (1, 0, 0)
        )
        prompt += asked.get("_bad_words_token_ids", [[0]])[0]
        tokens = np.array(prompt + output, dtype=np.int32)
        shaping = LogitsProcessing.for_request(params, tokens, len(prompt), VOCAB_SIZE)
        for length in (len(new), 0, len(new)):  # what came with one is not kept for the next
            logits = torch.randn(VOCAB_SIZE)
            right = by_vllm(logits, params, prompt, output + new[:length])
            if shaping is not None:  # as once min_tokens are there
                shaping(logits, new[:length])
            torch.testing.assert_close(logits, right)


def test_requests_without_parameters_have_no_processing():
    tokens = np.array([1, 2], dtype=np.int32)
    for params in (SamplingParams(), SamplingParams(temperature=0, stop_token_ids=[3], logprobs=2)):
        assert LogitsProcessing.for_request(params, tokens, 1, VOCAB_SIZE) is None


def test_a_dead_end_is_left_to_the_full_pass():
    """Logits of minus infinity alone would look like a broken level."""
    asked = dict(
        allowed_token_ids=[4, 5], _bad_words_token_ids=[[4, 4], [4, 5]], presence_penalty=1
    )
    tokens = np.array([1, 5], dtype=np.int32)
    shaping = LogitsProcessing.for_request(SamplingParams(**asked), tokens, 1, VOCAB_SIZE)
    for new, is_shaped in (([5], True), ([5, 4], False)):
        logits = torch.zeros(VOCAB_SIZE)
        shaping(logits, new)
        assert bool((logits == -torch.inf).any()) == is_shaped


def test_min_tokens_are_nothing_once_they_are_there():
    def shaping(num_output: int):
        tokens = np.ones(3 + num_output, dtype=np.int32)
        params = SamplingParams(min_tokens=2, stop_token_ids=[5])
        return LogitsProcessing.for_request(params, tokens, 3, VOCAB_SIZE)

    assert shaping(1) is not None and shaping(2) is None
