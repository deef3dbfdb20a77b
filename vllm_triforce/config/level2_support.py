"""Targets for which level 2 steps aside: levels 1 and 3 speculate for them.

Level 2 runs the target over a part of its KV cache. Where the attention has no such part, drafts go
straight to the full pass, as with ``levels="1,3"``.
"""

import dataclasses

from vllm_triforce.config.check_draft import has_alibi, has_sinks
from vllm_triforce.config.keys import KEYS
from vllm_triforce.config.triforce_config import TriForceConfig


def why_no_level2(model_config, is_cpu: bool) -> str | None:
    """Return why level 2 takes no part in speculating for a target; None if it does.

    Args:
        model_config: vLLM's, of the target.
    """
    if has_recurrent_layers(model_config):
        return "its linear-attention or state-space layers keep no KV cache to retrieve from"
    if model_config.use_mla:
        return "its multi-head latent attention (MLA) caches no keys per head to select by"
    if has_alibi(model_config):
        return "layers with ALiBi stay dense, and it has no others"
    if (window := _window_of_all_layers(model_config)) is not None:
        return f"each of its layers has a window of {window} tokens, with nothing beyond it to read"
    if not is_cpu and has_sinks(model_config):
        return "level 2's attention on GPUs has no attention sinks yet"
    if (lengths := _unequal_lengths(model_config)) is not None:
        key, value = lengths
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


def _unequal_lengths(model_config) -> tuple[int, int] | None:
    """Return the lengths of a key and of a value where MiMo-V2's full attention has two.

    vLLM then takes a DIFFKV backend (``MiMoV2Attention`` in vllm/model_executor/models/mimo_v2.py).
    """
    text_config = model_config.hf_text_config
    if not text_config.model_type.startswith("mimo_v2"):
        return None
    key = text_config.head_dim
    value = getattr(text_config, "v_head_dim", None)
    return None if value in (None, key) else (key, value)


# Tokens of a proposal by default, if layers keep a state for each.
_MAX_STATES = 4

# Keys that have no use without level 2.
_LEVEL2_KEYS = (
    "level2_model",
    "retrieval_budget",
    "retrieval_recent_tokens",
    "refresh_interval",
    "selection",
    "kv_offload_gib",
)


def fit_levels(config: TriForceConfig, model_config, is_cpu: bool) -> TriForceConfig:
    """Leave level 2 out of the keys that a user gave, if it takes no part with the target.

    Raises:
        ValueError: a key asks for level 2 all the same.
    """
    reason = why_no_level2(model_config, is_cpu)
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


def limit_states(config: TriForceConfig, model_config) -> TriForceConfig:
    """Limit the default length of proposals where vLLM keeps a recurrent state for each token.

    Qwen3.8-27B has 150 MB of states a request and token.
    """
    if not has_recurrent_layers(model_config):
        return config
    length = min(config.num_speculative_tokens, _MAX_STATES)
    return dataclasses.replace(config, num_speculative_tokens=length)
