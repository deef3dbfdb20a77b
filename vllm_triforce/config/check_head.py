"""Check heads, EAGLE-3 and MTP layers, by their configs, before the target loads."""

import os

_REMEDY = "Use a head trained for this target, or leave 'model' out for prompt lookup."

# Parts of the names of other kinds of heads, which level 1 cannot run.
_OTHER_KINDS = ("eagle", "mtp", "medusa", "dflash", "dspark")


# Targets whose MTP layers level 1 runs, by vLLM's class of the layer: it has plain attention, is
# used for every token of a draft, and returns one tensor, for logits and as its next input. With
# each the target's class, and a part of the names of the layer's weights in a checkpoint.
_MTP_TARGETS = {
    "MiMoMTPModel": ("MiMoForCausalLM", ".mtp_layers."),
    "Glm4MoeMTPModel": ("Glm4MoeForCausalLM", ".layers.{num_hidden_layers}."),
    "ErnieMTPModel": ("Ernie4_5_MoeForCausalLM", ".mtp_block."),
}


def is_head(hf_config) -> bool:
    """True if a draft's config is that of a head that level 1 may run.

    Args:
        hf_config: as vLLM reads a draft's, which turns some targets into their MTP layers.
    """
    return is_mtp(hf_config) or _is_eagle3(hf_config)


def _is_eagle3(hf_config) -> bool:
    """True for an EAGLE-3 head, in its own form or of speculators."""
    return any("eagle3" in name.lower() for name in _architectures(hf_config))


def is_mtp(hf_config) -> bool:
    """True for MTP layers that level 1 may run."""
    return any(name in _MTP_TARGETS for name in _architectures(hf_config))


def _architectures(hf_config) -> list[str]:
    return getattr(hf_config, "architectures", None) or []


def check_kind(draft: str, hf_config) -> None:
    """Refuse heads of other kinds, which would be taken for a draft model.

    Raises:
        ValueError: the draft is such a head.
    """
    for name in () if is_head(hf_config) else _architectures(hf_config):
        if any(kind in name.lower() for kind in _OTHER_KINDS):
            raise ValueError(
                f"draft model {draft!r} is a head of the kind {name}, which level 1 does not run. "
                "Use an EAGLE-3 head or a draft model, or leave 'model' out for prompt lookup."
            )


def check_head(head: str, hf_config, target_config) -> None:
    """Refuse a head that does not fit the target, or a kind that level 1 cannot run.

    Raises:
        ValueError: the target gives no hidden states, or others than the head reads; the head
            reads the last state alone, or has multi-head latent attention; or MTP layers are not
            the target's own, or not one.
    """
    if is_mtp(hf_config):
        _check_mtp(head, hf_config, target_config)
        return
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    where = f"EAGLE-3 head {head!r}"
    (architecture,) = _architectures(hf_config)[:1]
    if "Deepseek" in architecture:
        raise ValueError(
            f"{where} ({architecture}) has multi-head latent attention, which level 1's window "
            f"does not support. {_REMEDY}"
        )
    if not _eagle_config(hf_config).get("use_aux_hidden_state", True):
        raise ValueError(
            f"{where} reads the target's last hidden state alone (use_aux_hidden_state), which "
            f"level 1 does not support. {_REMEDY}"
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
    layers = aux_layers(hf_config, target_config)
    num_layers = target_config.get_total_num_hidden_layers()
    if len(set(layers)) < len(layers) or not 0 <= min(layers) <= max(layers) <= num_layers:
        raise ValueError(
            f"{where} reads the states before the layers {layers}, and the target has "
            f"{num_layers} layers. Name distinct layers with eagle_aux_hidden_state_layer_ids in "
            "its config.json."
        )


def _check_mtp(model: str, hf_config, target_config) -> None:
    """Refuse a model that is not the target, or without exactly one MTP layer and its weights.

    vLLM builds the layers by the target's config.
    """
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    (layer,) = (name for name in _architectures(hf_config) if name in _MTP_TARGETS)
    (architecture,) = target_config.architectures[:1]
    is_target = os.path.realpath(_offline(model)) == os.path.realpath(target_config.model)
    wanted, part = _MTP_TARGETS[layer]
    if wanted != architecture or not is_target:
        raise ValueError(
            f"draft model {model!r}: vLLM would load its MTP layers ({layer}), which fit the model "
            f"itself alone, and the target is {target_config.model!r}, a {architecture}. Name the "
            "target itself, or another draft model."
        )
    num_layers = getattr(target_config.hf_config, "num_nextn_predict_layers", None)
    if num_layers and num_layers > 1:
        raise ValueError(
            f"draft model {model!r} has {num_layers} MTP layers (num_nextn_predict_layers), and "
            "level 1 runs models with one. Use another draft, or leave 'model' out for prompt "
            "lookup."
        )
    if not num_layers:
        raise ValueError(
            f"draft model {model!r} has no MTP layers (num_nextn_predict_layers in its config.json)"
            ", and vLLM runs models of its kind as a draft by these alone. Use another draft, or "
            "leave 'model' out for prompt lookup."
        )
    part = part.format(num_hidden_layers=target_config.get_total_num_hidden_layers())
    # Empty for formats other than safetensors.
    weights = get_safetensors_params_metadata(model, revision=target_config.revision)
    if weights and not any(part in name for name in weights):
        raise ValueError(
            f"draft model {model!r} has no weights of the MTP layer that its config.json names "
            f"(none called *{part}*). Use a checkpoint that kept them, or leave 'model' out for "
            "prompt lookup."
        )


def _offline(model: str) -> str:
    """Return the folder by which ``EngineArgs`` replaces a hub name if HF_HUB_OFFLINE is set, else
    the name."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError
    from vllm.transformers_utils.repo_utils import get_model_path

    if not constants.HF_HUB_OFFLINE:
        return model
    try:
        return str(get_model_path(model))
    except (LocalEntryNotFoundError, ValueError):
        return model


def aux_layers(hf_config, target_config) -> list[int]:
    """Return the target's layers before which a head reads states, by default vLLM's."""
    name = "eagle_aux_hidden_state_layer_ids"
    given = getattr(hf_config, name, None) or _eagle_config(hf_config).get(name)
    num_layers = target_config.get_total_num_hidden_layers()
    return list(given or (2, num_layers // 2, num_layers - 3))


def _eagle_config(hf_config) -> dict:
    return getattr(hf_config, "eagle_config", None) or {}
