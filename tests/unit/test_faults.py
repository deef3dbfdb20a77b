"""Promise: what breaks is named with its remedy; a level that breaks costs speed, not output."""

import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from vllm import _custom_ops as ops
from vllm.transformers_utils import config as vllm_config
from vllm.transformers_utils import repo_utils

from tests.conftest import triforce
from tests.models import make_architecture, make_head, make_llama, make_mimo
from tests.refusals import engine_config, refused
from vllm_triforce.attention.cpu import FP8
from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.config.check_draft import check_head
from vllm_triforce.core.models import loading_draft

# What becomes of a file's bytes, and what is said of it.
FILES = {
    "truncated weights": (
        "model.safetensors",
        lambda its: its[:-1000],
        r"bytes is truncated.* not fully covered",
    ),
    "truncated header": (
        "model.safetensors",
        lambda its: its[:100],
        "of 100 bytes is truncated or not a safetensors file",
    ),
    "empty weights": ("model.safetensors", lambda its: b"", "of 0 bytes is truncated"),
    "no safetensors": (
        "model.safetensors",
        lambda its: (10).to_bytes(8, "little") + b"not json!!" + bytes(99),
        "not a safetensors file .*invalid JSON in header",
    ),
    "broken config": ("config.json", lambda its: its[:-40], "cannot be read"),
    "empty config": ("config.json", lambda its: b"{}", "cannot be read"),
}


@pytest.mark.parametrize("name, corrupt, wanted", FILES.values(), ids=FILES)
def test_corrupt_draft_is_refused_before_weights_load(gqa_pair, tmp_path, name, corrupt, wanted):
    """The message names the draft, the fault and the fix."""
    draft = tmp_path / "draft"
    shutil.copytree(gqa_pair["draft"], draft)
    (draft / name).write_bytes(corrupt((draft / name).read_bytes()))
    with refused(str(draft), "prompt lookup") as raised:
        engine_config(gqa_pair["target"], triforce(model=str(draft)))
    assert raised.match(wanted)


def test_draft_of_another_vocabulary(gqa_pair, tmp_path):
    draft = make_llama(tmp_path / "draft", vocab_size=4100)
    with pytest.raises(ValueError, match=r"vocabulary of 4100 tokens.*4096.*tokenizer"):
        engine_config(gqa_pair["target"], triforce(model=draft))


# Keys of a head's config, and what is said of it.
HEADS = {
    "another hidden size": ({"target_hidden_size": 72}, "states of 72 numbers"),
    "layers of another target": (
        {"eagle_aux_hidden_state_layer_ids": [2, 9, 12]},
        r"layers \[2, 9, 12\], and the target has 2 layers",
    ),
    "default layers of a large target": (
        {"eagle_aux_hidden_state_layer_ids": None},
        r"layers \[2, 1, -1\].*eagle_aux_hidden_state_layer_ids",
    ),
    "the last state alone": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "last hidden state alone",
    ),
    "another kind": ({"architectures": ["PeagleLlamaForCausalLM"]}, "kind PeagleLlamaForCausalLM"),
    "latent attention": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
    "another vocabulary": ({"vocab_size": 4100}, "vocabulary of 4100 tokens"),
}


@pytest.mark.parametrize("changes, wanted", HEADS.values(), ids=HEADS)
def test_a_head_that_does_not_fit_is_refused_before_weights_load(
    gqa_pair, tmp_path, changes, wanted
):
    target = gqa_pair["target"]
    head = make_head(tmp_path / "head", target, draft_vocab=64, layers=(0, 1, 2), **changes)
    with refused(head) as raised:
        engine_config(target, triforce(model=head))
    assert raised.match(wanted)


@pytest.mark.parametrize("name", ["EAGLE3-Llama", "eagle-heads/mine", "dflash"])
def test_a_heads_path_does_not_change_what_it_is(gqa_pair, tmp_path, name):
    """vLLM guesses its method from the path, and drops a block of each prefix hit for EAGLE."""
    target = gqa_pair["target"]
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    head = make_head(tmp_path / name, target, draft_vocab=64, layers=None, **layers)
    config = engine_config(target, triforce(model=head)).speculative_config
    assert config.method == "draft_model" and not config.use_eagle()
    hf_config = config.draft_model_config.hf_config
    assert hf_config.eagle_aux_hidden_state_layer_ids == [0, 1]
    assert hf_config.num_aux_hidden_states == 2
    assert config.draft_model_config.architectures == ["LlamaForCausalLMEagle3"]


def test_mtp_layers_of_the_target(tmp_path):
    """Named by the target's own path."""
    target = make_mimo(tmp_path / "mimo")
    own = engine_config(target, triforce(model=target))
    config = own.speculative_config
    assert config.method == "draft_model"
    assert config.draft_model_config.architectures == ["MiMoMTPModel"]
    keys = own.additional_config["triforce"]
    assert (keys["draft_sources"], keys["num_sink_tokens"]) == ("head", 0)


def test_mtp_layers_that_do_not_fit(gqa_pair, tmp_path):
    mimo = make_mimo(tmp_path / "mimo", vocab_size=4096)
    with pytest.raises(ValueError, match=r"MiMoMTPModel.*LlamaForCausalLM.*Name the target itself"):
        engine_config(gqa_pair["target"], triforce(model=mimo))
    other = make_mimo(tmp_path / "other", vocab_size=4096)
    with pytest.raises(ValueError, match=r"fit the model itself alone.*Name the target itself"):
        engine_config(mimo, triforce(model=other))
    file = tmp_path / "mimo" / "config.json"
    file.write_text(file.read_text().replace('"num_nextn_predict_layers": 1', '"unused": 1'))
    with pytest.raises(ValueError, match=r"no MTP layers \(num_nextn_predict_layers"):
        engine_config(mimo, triforce(model=mimo))
    file.write_text(file.read_text().replace('"unused": 1', '"num_nextn_predict_layers": 3'))
    with pytest.raises(ValueError, match=r"has 3 MTP layers.*level 1 runs models with one"):
        engine_config(mimo, triforce(model=mimo))


def test_an_offline_target_is_itself(tmp_path, monkeypatch):
    """With HF_HUB_OFFLINE vLLM puts the folder in the place of the target's name alone."""
    folder = make_mimo(tmp_path / "mimo")
    config = engine_config(folder, triforce(model=folder))
    hf_config = config.speculative_config.draft_model_config.hf_config
    with pytest.raises(ValueError, match="Name the target itself"):
        check_head("someone/mimo", hf_config, config.model_config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folders = {"someone/mimo": folder, "someone/other": str(tmp_path)}
    monkeypatch.setattr(repo_utils, "get_model_path", folders.get)
    with pytest.raises(ValueError, match="Name the target itself"):
        check_head("someone/other", hf_config, config.model_config)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_config, "get_safetensors_params_metadata", lambda *args, **keys: {})
        check_head("someone/mimo", hf_config, config.model_config)


def test_an_mtp_layer_without_weights(tmp_path):
    """As checkpoints that a quantizer left it out of; a folder without safetensors is not read."""
    mimo = make_mimo(tmp_path / "mimo")
    file = tmp_path / "mimo" / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if "mtp" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights of the MTP layer.*\*\.mtp_layers\.\*"):
        engine_config(mimo, triforce(model=mimo))
    file.unlink()
    engine_config(mimo, triforce(model=mimo), load_format="dummy")


def test_a_draft_whose_path_is_that_of_a_head(gqa_pair, tmp_path):
    draft = tmp_path / "eagle-mine"
    shutil.copytree(gqa_pair["draft"], draft)
    with pytest.raises(ValueError, match=r"takes it for a head of 'eagle'.*Rename its folder"):
        engine_config(gqa_pair["target"], triforce(model=str(draft)))


def test_a_head_for_a_target_that_returns_no_states(gqa_pair, tmp_path):
    target = make_architecture(tmp_path / "target", "gemma3", hidden_size=64)
    head = make_head(tmp_path / "head", gqa_pair["target"], draft_vocab=64, layers=(0, 1, 2))
    with pytest.raises(ValueError, match="does not return the hidden states"):
        engine_config(target, triforce(model=head))


def test_a_loader_that_fails_names_the_draft():
    """vLLM's own error does not say which of the two models it is about."""
    with (
        pytest.raises(RuntimeError, match=r"draft model 'X'.*KeyError.*lm_head.*prompt lookup"),
        loading_draft("X"),
    ):
        raise KeyError("lm_head.weight")


# Memory.


def test_failed_allocation_names_size_and_remedy():
    size = 1 << 60
    with (
        pytest.raises(MemoryError, match=r"the cache needs 1\.00 GiB.*could not.*; lower it"),
        checked_allocation("the cache", 1 << 30, torch.device("meta"), "lower it"),
    ):
        torch.empty(size, dtype=torch.uint8)
    with (
        pytest.raises(MemoryError, match=r"needs 1073741824\.00 GiB.*are available; lower it"),
        checked_allocation("the cache", size, torch.device("cpu"), "lower it"),
    ):
        raise AssertionError("refused before anything is allocated")


# NaN.


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU build has such a cache with AVX-512"
)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_no_fp8_cache_on_the_cpu_holds_a_nan(kv_cache_dtype, wrong):
    """vLLM's kernel stores the largest number in its place."""
    cache = torch.zeros(1, 1, 64, 32, dtype=torch.uint8)
    keys, values = cache.chunk(2, dim=2)
    new = torch.full((32, 1, 32), wrong)
    ops.cpu_attn_reshape_and_cache(
        new,
        new.clone(),
        keys,
        values,
        torch.arange(32),
        "vec",
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=kv_cache_dtype,
    )
    stored = cache.view(FP8[kv_cache_dtype]).float()
    assert bool(stored.isfinite().all()) and bool((stored > 400).all())
