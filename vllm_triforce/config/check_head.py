"""Checks of EAGLE-3 heads, by their configs, before the target loads."""

_REMEDY = "Use a head trained for this target, or leave 'model' out for prompt lookup."


def is_head(hf_config) -> bool:
    """True if a draft's config is that of an EAGLE-3 head, in its own form or of speculators."""
    return any("eagle3" in name.lower() for name in getattr(hf_config, "architectures", None) or ())


def check_head(head: str, hf_config, target_config) -> None:
    """Refuse a head that does not fit the target, or a kind that level 1 cannot run.

    Raises:
        ValueError: the target gives no hidden states, or others than the head reads; or the head
            drafts in parallel or with multi-head latent attention.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    where = f"EAGLE-3 head {head!r}"
    (architecture,) = hf_config.architectures[:1]
    if "Deepseek" in architecture:
        raise ValueError(
            f"{where} ({architecture}) has multi-head latent attention, which level 1's window "
            f"does not support. {_REMEDY}"
        )
    if not supports_eagle3(get_model_cls(target_config)):
        raise ValueError(
            f"{where}: vLLM's {target_config.architectures[0]} does not return the hidden states "
            "that it reads. Leave 'model' out for prompt lookup, or name a draft model."
        )
    wanted = getattr(hf_config, "target_hidden_size", None) or hf_config.hidden_size
    if wanted != (size := target_config.get_hidden_size()):
        raise ValueError(
            f"{where} reads hidden states of {wanted} numbers, and those of the target "
            f"{target_config.model!r} have {size}. {_REMEDY}"
        )
    layers, num_layers = _aux_layers(hf_config), target_config.get_total_num_hidden_layers()
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]
    if len(set(layers)) < len(layers) or not 0 <= min(layers) <= max(layers) <= num_layers:
        raise ValueError(
            f"{where} reads the states before the layers {list(layers)}, and the target has "
            f"{num_layers} layers. Name distinct layers with eagle_aux_hidden_state_layer_ids in "
            "its config.json."
        )


def _aux_layers(hf_config) -> list[int] | None:
    """Return the layers that a head's config names, None for the target's default."""
    eagle_config = getattr(hf_config, "eagle_config", None) or {}
    return (
        getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        or eagle_config.get("eagle_aux_hidden_state_layer_ids")
        or None
    )
