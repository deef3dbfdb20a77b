"""Promises: level 2's copy is the target with fewer bits a weight, or is refused before it loads;
level 2 steps aside for targets that it has nothing to retrieve from, by their config.

Engines of such targets are tests/parity's; what users are told is tests/unit/test_plugin.py's.
"""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from vllm.config import LoadConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import triforce
from tests.models import PAIR, make_head, make_int8
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.level2 import (
    check_level2_model,
    level2_model_config,
    online_schemes,
    why_no_level2,
)
from vllm_triforce.core.models import copy_config
from vllm_triforce.plugin import register

TARGET = str(PAIR / "target")


@pytest.fixture(scope="module")
def target():
    return ModelConfig(TARGET, dtype="float32", max_model_len=4096)


def made(name: str, target, enable_eplb: bool = False):
    parallel = SimpleNamespace(enable_eplb=enable_eplb)
    engine = SimpleNamespace(
        model_config=target, parallel_config=parallel, load_config=LoadConfig()
    )
    check_level2_model(name, engine)
    return level2_model_config(name, target)


def test_a_dtype_is_the_targets_checkpoint_in_it(target):
    config = made("bfloat16", target)
    assert (config.model, str(config.dtype)) == (TARGET, "torch.bfloat16")
    assert config.max_model_len == target.max_model_len and config.quantization is None


def test_a_quantized_checkpoint_keeps_its_own_scheme(target, tmp_path):
    config = made(make_int8(tmp_path / "int8", TARGET), target)
    assert config.quantization == "compressed-tensors"


def test_a_checkpoint_of_the_hub_may_name_its_revision(target, tmp_path, monkeypatch):
    """The target's revision is of another repository; a folder may have an @ in its name."""
    folder = shutil.copytree(TARGET, tmp_path / "a@b")
    assert made(str(folder), target).model == str(folder)
    asked = []
    monkeypatch.setattr(
        "vllm.config.ModelConfig",
        lambda **its: asked.append((its["model"], its["revision"])) or SimpleNamespace(),
    )
    for name in ("some/target-int8", "some/target-int8@0123abc"):
        level2_model_config(name, target)
    assert asked == [("some/target-int8", None), ("some/target-int8", "0123abc")]


def test_the_compile_key_names_the_states_that_a_head_reads(tmp_path):
    """They are outputs of the copy's graph; another head may come to the same folder."""
    register()

    def key_of(*layers: int) -> str:
        head = make_head(tmp_path / "head", TARGET, draft_vocab=2048, layers=layers)
        keys = triforce(model=head, level2_model="bfloat16")
        args = EngineArgs(TARGET, dtype="float32", max_model_len=4096, speculative_config=keys)
        return copy_config("bfloat16", args.create_engine_config()).compute_hash()

    assert key_of(0, 1, 2) == key_of(0, 1, 2) != key_of(1, 2, 3)


def test_overrides_of_the_target_reach_the_copy():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, rope_theta=1e4)
    target = ModelConfig(TARGET, dtype="float32", hf_overrides={"rope_parameters": yarn})
    config = made("bfloat16", target)
    assert config.hf_text_config.rope_parameters == target.hf_text_config.rope_parameters
    assert config.hf_text_config.rope_parameters["factor"] == 4.0


def test_what_the_target_is_served_in_saves_nothing(target):
    for name in ("float32", "bfloat16"):
        served = copy.copy(target)
        served.dtype = torch.bfloat16 if name == "bfloat16" else target.dtype
        with pytest.raises(ValueError, match=f"level2_model='{name}' has no fewer bits than"):
            made(name, served)


def test_a_quantized_target_needs_a_checkpoint(tmp_path):
    target = ModelConfig(make_int8(tmp_path / "int8", TARGET), dtype="float32")
    with pytest.raises(ValueError, match=r"is quantized itself \(compressed-tensors\)"):
        made("bfloat16", target)


@pytest.mark.parametrize(
    "field, value",
    [("num_hidden_layers", 1), ("num_key_value_heads", 2), ("vocab_size", 4000), ("rope_theta", 5)],
)
def test_another_model_is_refused_by_the_field_that_differs(target, tmp_path, field, value):
    other = shutil.copytree(TARGET, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    assert config.get(field) != value
    if field == "rope_theta":
        config.pop("rope_theta", None)
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": float(value)}
        field = "rope_parameters"
    else:
        config[field] = value
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"its {field} is .*, the target's"):
        made(str(other), target)


def test_experts_that_move_are_refused(target):
    with pytest.raises(ValueError, match="not supported with --enable-eplb"):
        made("bfloat16", target, enable_eplb=True)


@pytest.mark.parametrize("name", ["int8_per_channel_weight_only", "bfloat17"])
def test_schemes_for_experts_alone_are_unknown_to_a_dense_target(target, name):
    """vLLM would leave all weights of a dense model as they are."""
    with pytest.raises(ValueError, match=rf"level2_model='{name}' cannot be served .*'bfloat16'"):
        made(name, target)


def test_schemes_need_a_target_in_16_bits(target):
    """As vLLM's online quantization does."""
    assert not online_schemes(target)
    served = copy.copy(target)
    served.dtype = torch.bfloat16
    config = level2_model_config("fp8", served)
    assert config.quantization == "fp8_per_tensor" and config.quantization_config is not None
    with pytest.raises(ValueError, match=r"Name 'fp8', .*, a checkpoint of the target"):
        level2_model_config("float16", served)


def test_without_level_2_there_is_nothing_to_copy_for():
    with pytest.raises(ValueError, match=r"level2_model='bfloat16' is not used with levels='1,3'"):
        TriForceConfig(level2_model="bfloat16", levels="1,3")
    with pytest.raises(ValueError, match="level2_model='' names no model"):
        TriForceConfig(level2_model="")


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
    ("target", "wanted"),
    [
        (model_config(), None),
        (model_config(is_hybrid=True, has_inner_state=True), "state-space layers"),
        (model_config(is_hybrid=True, architectures=["Qwen3NextForCausalLM"]), None),
        (model_config(use_mla=True), "multi-head latent attention"),
        (model_config(uses_alibi=True), "ALiBi"),
        (model_config(window=64), "window of 64 tokens"),
        (model_config({"layer_types": ["sliding_attention"] * 2}, 64), "window of 64"),
        (model_config({"layer_types": ["sliding_attention", "full_attention"]}, 64), None),
        (model_config({"model_type": "minimax_m3"}), "selects blocks of keys itself"),
        (model_config({"model_type": "gpt_oss"}), None),
        (model_config({"model_type": "mimo_v2_flash", "head_dim": 32}), None),
        (
            model_config({"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128}),
            "192 numbers and its values 128",
        ),
    ],
)
def test_why_level_2_takes_no_part(target, wanted):
    reason = why_no_level2(target)
    assert reason is None if wanted is None else wanted in reason


def test_proposals_are_short_where_each_token_has_a_state():
    """A length that the controller chooses stays chosen; vLLM keeps the states of the longest."""
    settings = dict(can_adapt=True, has_fixed_shapes=True)
    filled = TriForceConfig().with_defaults(**settings)
    limited = TriForceConfig().with_defaults(has_states=True, **settings)
    assert (filled.num_speculative_tokens, limited.num_speculative_tokens) == (12, 4)
    assert limited.adaptive_keys == filled.adaptive_keys
    # Level 2 has states of its own for each request that speculates.
    assert limited.resolve(32).max_speculating_seqs == 8
    given = TriForceConfig(num_speculative_tokens=6, gamma=3, max_speculating_seqs=16)
    filled = given.with_defaults(**settings)
    assert given.with_defaults(has_states=True, **settings) == filled
