"""Promise: on Runner V1, what a request asks of its logits makes no draft fail. That drafts are
shaped as vLLM's sampler shapes the full pass is said in tests/parity (shaped-*)."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_triforce.runner_v1.sampling import LogitsProcessing

VOCAB_SIZE = 23


def test_tokens_of_a_larger_tokenizer_are_none_of_the_model():
    words = [[VOCAB_SIZE], [1, VOCAB_SIZE], [4]]
    params = SamplingParams(
        _bad_words_token_ids=words, repetition_penalty=1.2, frequency_penalty=0.1
    )
    tokens = np.array([2, VOCAB_SIZE, 1], dtype=np.int32)
    shaping = LogitsProcessing.for_request(params, tokens, 2, VOCAB_SIZE)
    logits = torch.ones(VOCAB_SIZE)
    shaping(logits, [1])
    assert logits[4] == -torch.inf and logits[2] == pytest.approx(1 / 1.2)
    assert logits[1] == pytest.approx(1 / 1.2 - 0.2)


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
