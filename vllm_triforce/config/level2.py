"""Level 2's conditions: its copy of the target (``level2_model``), and targets it steps aside for.

Level 2 runs the target over a part of its KV cache. Where the attention has no such part, drafts go
straight to the full pass, as with ``levels="1,3"``. All checks raise a ``ValueError``.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from vllm_triforce.config.check_draft import has_alibi
from vllm_triforce.config.keys import KEYS
from vllm_triforce.config.triforce_config import TriForceConfig

DTYPES = ("bfloat16", "float16", "float32")

# Targets whose recurrent layers level 2 runs with states of its own: gated delta nets.
_GATED_DELTA_NETS = (
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)

# Settings of the target that hold for another checkpoint of it.
_SHARED_SETTINGS = (
    *("tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code", "seed"),
    *("hf_overrides", "enforce_eager", "model_impl", "disable_sliding_window"),
)

# Keys that have no use without level 2.
_LEVEL2_KEYS = (
    "level2_model",
    "retrieval_budget",
    "retrieval_recent_tokens",
    "selection",
    "kv_offload_gib",
)


def online_schemes(target_config) -> dict[str, Any]:
    """Return vLLM's online quantization schemes that fit this target, by name.

    Some reach experts alone, and all need activations of 16 bits.
    """
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    if target_config.dtype.itemsize != 2:
        return {}
    has_experts = target_config.get_num_experts() > 0
    schemes = {
        name: scheme
        for name, scheme in _ONLINE_SHORTHANDS.items()
        if scheme.linear is not None or has_experts
    }
    return {"fp8": schemes["fp8_per_tensor"], **schemes}


def level2_model_config(name: str, target_config) -> Any:
    """Make vLLM's ``ModelConfig`` of the copy that ``level2_model`` names.

    Raises:
        ValueError: the checkpoint cannot be read, or the dtype saves nothing.
    """
    schemes = online_schemes(target_config)
    if name not in (*DTYPES, *schemes):
        return _checkpoint_config(name, target_config)
    target, dtype = target_config.model, target_config.dtype
    if target_config.quantization is not None:
        raise ValueError(
            f"level2_model={name!r}: the target {target!r} is quantized itself "
            f"({target_config.quantization}), so that this copy saves nothing. Name a checkpoint "
            "with fewer bits a weight, or leave it out."
        )
    config = copy.copy(target_config)
    if name in schemes:
        config.quantization = "fp8_per_tensor" if name == "fp8" else name
        config.quantization_config = schemes[name]
        return config
    import torch

    config.dtype = getattr(torch, name)
    if config.dtype.itemsize >= dtype.itemsize:
        raise ValueError(
            f"level2_model={name!r} has no fewer bits than {str(dtype).removeprefix('torch.')}, in "
            f"which the target {target!r} is served, so that a copy saves nothing. Name "
            f"{_remedy(target_config)}, or leave it out."
        )
    return config


def _checkpoint_config(name: str, target_config) -> Any:
    from vllm.config import ModelConfig

    # The target's revision is of another repository. A folder's name may have an @.
    model, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    shared = {name: getattr(target_config, name) for name in _SHARED_SETTINGS}
    try:
        config = ModelConfig(model=model, revision=revision or None, **shared)
    except Exception as error:
        raise ValueError(
            f"level2_model={name!r} cannot be served ({_reason(error)}). Name "
            f"{_remedy(target_config)}, or leave it out."
        ) from error
    config.max_model_len = target_config.max_model_len
    return config


def _reason(error: Exception) -> str:
    """Return an error's message without the frame that pydantic puts around it."""
    lines = str(error).splitlines() or [type(error).__name__]
    if "validation error" in lines[0] and len(lines) > 1:
        return lines[1].strip().removeprefix("Value error, ").split(" [type=")[0]
    return lines[0]


def _remedy(target_config) -> str:
    """List the values that fit the target."""
    values: list[str] = []
    if target_config.quantization is None:
        values = [*online_schemes(target_config)] or ["bfloat16", "float16"]
    return ", ".join([*map(repr, values), "a checkpoint of the target with fewer bits a weight"])


def check_level2_model(name: str, vllm_config) -> None:
    """Refuse a copy that cannot be loaded here, or cannot share the target's KV cache."""
    from vllm.config import VllmConfig

    target_config = vllm_config.model_config
    if vllm_config.parallel_config.enable_eplb:
        raise ValueError(
            f"level2_model={name!r} is not supported with --enable-eplb: vLLM moves the experts of "
            "the target alone. Leave one of them out."
        )
    config = level2_model_config(name, target_config)
    copy_shape = _shape(config)
    for field, value in _shape(target_config).items():
        if copy_shape[field] != value:
            raise ValueError(
                f"level2_model={name!r} is another model than the target {target_config.model!r}: "
                f"its {field} is {copy_shape[field]!r}, the target's {value!r}. Level 2 reads the "
                "target's KV cache. Use a quantized checkpoint of the target itself."
            )
    try:
        VllmConfig.get_quantization_config(config, level2_load_config(config, vllm_config))
    except Exception as error:
        raise ValueError(
            f"level2_model={name!r} cannot be served here ({_reason(error)}). Use another dtype, "
            "scheme or checkpoint, or leave it out."
        ) from error


def level2_load_config(config, vllm_config) -> Any:
    """Return vLLM's ``LoadConfig`` of the copy; another checkpoint may be in another format."""
    load_config = vllm_config.load_config
    is_same_checkpoint = config.model == vllm_config.model_config.model
    load_format = load_config.load_format
    if load_format == "dummy" or (is_same_checkpoint and load_format != "ipc_cache"):
        return load_config
    return dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})


def _shape(model_config) -> dict[str, Any]:
    """Return the fields in which the copy must equal the target."""
    text = model_config.hf_text_config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    windows = ("rope_parameters", "sliding_window", "layer_types")
    return {
        "architectures": list(model_config.architectures),
        **{name: getattr(text, name, None) for name in names},
        "num_key_value_heads": model_config.get_total_num_kv_heads(),
        "head_dim": model_config.get_head_size(),
        "vocab_size": model_config.get_vocab_size(),
        **{name: getattr(text, name, None) for name in windows},
    }


def why_no_level2(model_config) -> str | None:
    """Return why level 2 takes no part in speculating for a target; None if it does."""
    has_own_states = any(name in _GATED_DELTA_NETS for name in model_config.architectures)
    if has_recurrent_layers(model_config) and not has_own_states:
        return "level 2 keeps no states for its kind of linear-attention or state-space layers"
    if model_config.use_mla:
        return "its multi-head latent attention (MLA) caches no keys per head to select by"
    if has_alibi(model_config):
        return "layers with ALiBi stay dense, and it has no others"
    if (window := _window_of_all_layers(model_config)) is not None:
        return f"each of its layers has a window of {window} tokens, with nothing beyond it to read"
    text_config = model_config.hf_text_config
    if text_config.model_type.startswith("minimax_m3"):
        return "its attention selects blocks of keys itself"
    if text_config.model_type.startswith("mimo_v2"):
        # With two lengths vLLM takes a DIFFKV backend for the full attention (``MiMoV2Attention``).
        key, value = text_config.head_dim, getattr(text_config, "v_head_dim", None)
        if value not in (None, key):
            return f"its keys have {key} numbers and its values {value}; level 2 takes one length"
    return None


def has_recurrent_layers(model_config) -> bool:
    """True if some layers carry a state from token to token."""
    return model_config.is_attention_free or model_config.is_hybrid or model_config.has_inner_state


def _window_of_all_layers(model_config) -> int | None:
    """Return the window in tokens; None if some layers read the whole context.

    As ``EngineArgs.create_engine_config`` in vllm/engine/arg_utils.py.
    """
    layer_types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    if any(layer_type != "sliding_attention" for layer_type in layer_types):
        return None
    return model_config.get_sliding_window()


def fit_levels(config: TriForceConfig, model_config) -> TriForceConfig:
    """Leave level 2 out of the keys that a user gave, if it takes no part with the target.

    A key that asks for level 2 all the same is refused.
    """
    reason = why_no_level2(model_config)
    if reason is None:
        return config
    given = {n: v for n in _LEVEL2_KEYS if (v := getattr(config, n)) != KEYS[n][0].default}
    if config.levels in ("2,3", "3"):
        given["levels"] = config.levels
    for name, value in given.items():
        raise ValueError(
            f"{name}={value!r} is not supported with target {model_config.model!r}: {reason}, so "
            "level 2 takes no part. Leave it out."
        )
    return dataclasses.replace(config, levels="1,3")
