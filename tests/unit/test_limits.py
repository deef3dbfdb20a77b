"""Promise: a request may turn speculation off or limit it for itself; bad values are refused."""

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.unit.wrapping import wrap
from vllm_triforce.config.request_args import request_limit
from vllm_triforce.core.limits import decodes_plainly
from vllm_triforce.vllm_patches.stock_behavior import mark


def params(extra_args: dict) -> SamplingParams:
    return SamplingParams(extra_args=extra_args)


@pytest.mark.parametrize(
    "extra_args, limit",
    [
        ({}, None),
        ({"others": "args"}, None),
        ({"triforce": True}, None),
        ({"triforce": 1}, None),  # the OpenAI API's true
        ({"triforce": False}, 0),
        ({"triforce": 0}, 0),
        ({"triforce": {"num_speculative_tokens": 3}}, 3),
        ({"triforce_num_speculative_tokens": 5}, 5),
        ({"triforce_num_speculative_tokens": 2**63}, 128),
        ({3: "no string"}, None),
        ({"triforce": True, "triforce_num_speculative_tokens": 0}, 0),
        ({"triforce_num_speculative_tokens": 5, "triforce": 0}, 0),
    ],
)
def test_limits(extra_args, limit):
    assert request_limit(params(extra_args)) == limit
    assert decodes_plainly(params(extra_args)) == (limit == 0)
    assert request_limit(SamplingParams()) is None


@pytest.mark.parametrize(
    "extra_args",
    [
        {"triforce": "off"},
        {"triforce": 3},
        {"triforce": 0.0},
        {"triforce": None},
        {"triforce": {"num_speculative_tokens": -1}},
        {"triforce": {"gamma": 2}},
        {"triforce_num_speculative_tokens": True},
        {"triforce_num_speculative_tokens": 2.5},
        {"triforce_gamma": 2},
    ],
)
def test_bad_values_are_refused_when_the_request_comes(extra_args):
    """As vLLM checks a request's parameters, where speculation is ours."""

    class Speculation:
        """vLLM's config."""

    config, (name,) = Speculation(), extra_args
    mark(config)
    validate = wrap("SamplingParams._validate_spec_decode", lambda *_: None)
    with pytest.raises(VLLMValidationError, match=f'{name}=.*Use "triforce": false to'):
        validate(params(extra_args), config)
