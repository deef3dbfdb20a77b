"""Configuration of level 2's copy of the target (``level2_model``), and its checks."""

from typing import Any

DTYPES = ("bfloat16", "float16", "float32")


def level2_model_config(name: str, target_config) -> Any:
    """Make vLLM's ``ModelConfig`` of the copy.

    Args:
        name: value of ``level2_model``: a dtype, a scheme of vLLM's online quantization, or a
            checkpoint.
        target_config: ``ModelConfig`` of the target.

    Raises:
        ValueError: there is no such checkpoint, or vLLM cannot serve the copy here.
    """
    from vllm.config import ModelConfig

    is_dtype, is_scheme = name in DTYPES, name in online_schemes()
    is_same_checkpoint = is_dtype or is_scheme
    quantization = target_config.quantization if is_dtype else name if is_scheme else None
    try:
        return ModelConfig(
            model=target_config.model if is_same_checkpoint else name,
            tokenizer=target_config.tokenizer,
            tokenizer_mode=target_config.tokenizer_mode,
            trust_remote_code=target_config.trust_remote_code,
            revision=target_config.revision if is_same_checkpoint else None,
            code_revision=target_config.code_revision if is_same_checkpoint else None,
            tokenizer_revision=target_config.tokenizer_revision,
            dtype=name if is_dtype else target_config.dtype if is_scheme else "auto",
            quantization=quantization,
            seed=target_config.seed,
            max_model_len=target_config.max_model_len,
            hf_overrides=target_config.hf_overrides,
            config_format=target_config.config_format,
            enforce_eager=target_config.enforce_eager,
        )
    except Exception as error:
        known = ", ".join(map(repr, (*DTYPES, *sorted(online_schemes()))))
        raise ValueError(
            f"level2_model={name!r} cannot be served ({error}). Name a checkpoint of the target "
            f"with fewer bits a weight, or one of {known}."
        ) from error


def online_schemes() -> set[str]:
    """Return the names of vLLM's online quantization schemes, such as ``fp8_per_tensor``."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    return {"fp8", *_ONLINE_SHORTHANDS}


def check_level2_model(name: str, copy_config, target_config) -> None:
    """Refuse a copy that cannot read the target's KV cache, or that gains nothing.

    Args:
        copy_config, target_config: vLLM's ``ModelConfig`` of each.
    """
    is_same_checkpoint = copy_config.model == target_config.model
    same_numbers = copy_config.dtype == target_config.dtype
    if (
        is_same_checkpoint
        and same_numbers
        and copy_config.quantization == (target_config.quantization)
    ):
        raise ValueError(
            f"level2_model={name!r} is what the target {target_config.model!r} is served in, so "
            "that a copy saves nothing. Name fewer bits a weight, or leave it out."
        )
    ours, theirs = _shape(copy_config), _shape(target_config)
    for field, value in theirs.items():
        if ours[field] != value:
            raise ValueError(
                f"level2_model={name!r} is another model than the target {target_config.model!r}: "
                f"its {field} is {ours[field]!r}, the target's {value!r}. Level 2 reads the "
                "target's KV cache. Use a quantized checkpoint of the target itself."
            )


def _shape(model_config) -> dict[str, Any]:
    """Return all that decides what a model reads from and writes to its KV cache."""
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
