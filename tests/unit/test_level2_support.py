"""Promise: level 2 steps aside for targets that it has nothing to retrieve from, by their config.

Engines of such targets are tests/parity's; what users are told is tests/unit/test_plugin.py's.
"""

from types import SimpleNamespace

import pytest

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.level2 import limit_states, why_no_level2


def model_config(text: dict | None = None, window: int | None = None, **facts) -> SimpleNamespace:
    """Make what is read of a target's ``ModelConfig``."""
    plain = dict.fromkeys(
        ("is_attention_free", "is_hybrid", "has_inner_state", "use_mla", "uses_alibi"), False
    )
    return SimpleNamespace(
        **{**plain, "architectures": ["LlamaForCausalLM"], **facts},
        hf_text_config=SimpleNamespace(**{"model_type": "llama", **(text or {})}),
        get_sliding_window=lambda: window,
    )


@pytest.mark.parametrize(
    ("target", "on_gpu", "on_cpu"),
    [
        (model_config(), None, None),
        (model_config(is_hybrid=True, has_inner_state=True), "state-space layers", "state-space"),
        (model_config(use_mla=True), "multi-head latent attention", "latent attention"),
        (model_config(uses_alibi=True), "ALiBi", "ALiBi"),
        (model_config(window=64), "window of 64 tokens", "window of 64 tokens"),
        (model_config({"layer_types": ["sliding_attention"] * 2}, 64), "window of 64", "of 64"),
        (
            model_config({"layer_types": ["sliding_attention", "full_attention"]}, 64),
            None,
            None,
        ),
        (model_config({"model_type": "gpt_oss"}), "attention sinks", None),
        (model_config({"model_type": "mimo_v2_flash", "head_dim": 32}), None, None),
        (
            model_config({"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128}),
            "192 numbers and its values 128",
            "192 numbers and its values 128",
        ),
    ],
)
def test_why_level_2_takes_no_part(target, on_gpu, on_cpu):
    for is_cpu, wanted in ((False, on_gpu), (True, on_cpu)):
        reason = why_no_level2(target, is_cpu)
        assert reason is None if wanted is None else wanted in reason


def test_proposals_are_short_where_each_token_has_a_state():
    """A length that the controller chooses stays chosen; vLLM keeps the states of the longest."""
    filled = TriForceConfig(levels="1,3").with_defaults(can_adapt=True, has_fixed_shapes=True)
    assert limit_states(filled, model_config()) == filled
    limited = limit_states(filled, model_config(is_hybrid=True))
    assert (filled.num_speculative_tokens, limited.num_speculative_tokens) == (12, 4)
    assert limited.adaptive_keys == filled.adaptive_keys
