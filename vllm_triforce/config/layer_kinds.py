"""Kinds of attention that stay dense, told from a model's configuration."""


def has_alibi(model_config) -> bool:
    return model_config.uses_alibi or "Step1ForCausalLM" in model_config.architectures


def has_sinks(model_config) -> bool:
    """True if every layer has attention sinks (gpt-oss, Granite with sliding windows)."""
    text_config = model_config.hf_text_config
    has_layer_types = getattr(text_config, "layer_types", None) is not None
    is_granite = text_config.model_type in ("granite", "granitemoe")
    return text_config.model_type == "gpt_oss" or (
        is_granite and getattr(text_config, "attention_sinks", has_layer_types)
    )
