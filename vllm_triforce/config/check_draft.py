"""Checks of drafts by their configs and file headers, before the target loads.

A draft is a model, or a head: an EAGLE-3 head or MTP layers. All checks raise a ``ValueError``.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_triforce.config.triforce_config import TriForceConfig


def has_alibi(model_config) -> bool:
    """True if every layer uses ALiBi."""
    return model_config.uses_alibi or "Step1ForCausalLM" in model_config.architectures


def has_sinks(model_config) -> bool:
    """True if every layer has attention sinks (gpt-oss, Granite with sliding windows)."""
    text_config = model_config.hf_text_config
    has_layer_types = getattr(text_config, "layer_types", None) is not None
    is_granite = text_config.model_type in ("granite", "granitemoe")
    return text_config.model_type == "gpt_oss" or (
        is_granite and getattr(text_config, "attention_sinks", has_layer_types)
    )


def check_draft_files(folder: str) -> None:
    """Refuse truncated or unreadable safetensors files in a folder, without reading weights."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "numpy"):  # compares the header with the file's size
                pass
        except SafetensorError as error:
            raise ValueError(
                f"draft model {folder!r}: {path.name} of {os.path.getsize(path)} bytes is "
                f"truncated or not a safetensors file ({error}). Copy or download the file again, "
                "or leave 'model' out of speculative_config for prompt lookup."
            ) from error


def read_draft_config(draft: Mapping[str, Any], trust_remote_code: bool):
    """Read the draft's Hugging Face config as vLLM does, which turns some targets into MTP layers.

    Revisions are those that a user pinned, as reading a config may run the draft's code.
    """
    draft_model, revision = draft["model"], draft.get("revision")
    is_local = os.path.isabs(draft_model) or draft_model.startswith((".", "~"))
    is_local |= os.path.exists(draft_model) or draft_model.count("/") > 1  # no name on the Hub
    if is_local and not os.path.isfile(os.path.join(draft_model, "config.json")):
        raise ValueError(
            f"draft model {draft_model!r} is not a folder with a config.json. Correct 'model' in "
            "speculative_config, or leave it out for prompt lookup."
        )
    if os.path.isdir(draft_model):
        check_draft_files(draft_model)
    from vllm.config import SpeculativeConfig
    from vllm.transformers_utils.config import get_config

    try:
        config = get_config(
            draft_model,
            trust_remote_code=trust_remote_code,
            revision=revision,
            code_revision=draft.get("code_revision"),
        )
        return SpeculativeConfig.hf_config_override(config)
    except Exception as error:
        pinned = f" at revision {revision!r}" if revision is not None else ""
        raise ValueError(
            f"draft model {draft_model!r}{pinned} cannot be read ({error}). Correct 'model' in "
            "speculative_config, or leave it out for prompt lookup."
        ) from error


def check_draft(draft_model: str, draft_hf_config, target_config, config: TriForceConfig) -> None:
    """Refuse drafts whose kind, vocabulary or number of positions does not fit target or window."""
    for name in () if is_head(draft_hf_config) else _architectures(draft_hf_config):
        # It would be taken for a draft model.
        if any(kind in name.lower() for kind in _OTHER_HEADS):
            raise ValueError(
                f"draft model {draft_model!r} is a head of the kind {name}, which level 1 does not "
                "run. Use an EAGLE-3 head or a draft model, or leave 'model' out for prompt lookup."
            )
    text_config = draft_hf_config.get_text_config()
    draft_vocab, target_vocab = text_config.vocab_size, target_config.get_vocab_size()
    if draft_vocab != target_vocab:
        raise ValueError(
            f"draft model {draft_model!r} has a vocabulary of {draft_vocab} tokens, the target "
            f"{target_config.model!r} one of {target_vocab}. Use a draft with the target's "
            "tokenizer, or leave 'model' out for prompt lookup."
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and config.window_tokens > positions:
        raise ValueError(
            f"num_sink_tokens={config.num_sink_tokens or 0} and num_recent_tokens="
            f"{config.num_recent_tokens} make a window of {config.window_tokens} tokens, more than "
            f"the {positions} positions of draft model {draft_model!r}. Lower num_recent_tokens."
        )


def check_draft_kind(draft_config, is_cpu: bool) -> None:
    """Refuse drafts whose attention does not fit level 1's streaming window."""
    if draft_config.use_mla or draft_config.is_hybrid or draft_config.is_attention_free:
        raise ValueError(
            f"draft model {draft_config.model!r} must have plain attention (no MLA, no state "
            "space): level 1 runs it over a streaming window. Use another draft."
        )
    layer_types = set(getattr(draft_config.hf_text_config, "layer_types", None) or ())
    if len(layer_types) > 1 and not is_mtp(draft_config.hf_config):  # its types are the target's
        raise ValueError(
            f"draft model {draft_config.model!r} has layers of the kinds "
            f"{', '.join(sorted(layer_types))}, and level 1's window supports one kind. Use a "
            "draft whose layers are alike, or leave 'model' out for prompt lookup."
        )
    if not is_cpu and (has_alibi(draft_config) or has_sinks(draft_config)):
        raise ValueError(
            f"draft model {draft_config.model!r} has ALiBi or attention sinks, which level 1's "
            "window does not support on a GPU. Use another draft."
        )


_REMEDY = "Use a head trained for this target, or leave 'model' out for prompt lookup."

# Parts of the names of other kinds of heads, which level 1 cannot run.
_OTHER_HEADS = ("eagle", "mtp", "medusa", "dflash", "dspark")

# Targets whose MTP layers level 1 runs, by vLLM's class of the layer: it has plain attention, is
# used for every token of a draft, and returns one tensor, for logits and as its next input. With
# each the target's class, and a part of the names of the layer's weights in a checkpoint.
_MTP_TARGETS = {
    "MiMoMTPModel": (("MiMoForCausalLM",), ".mtp_layers."),
    "Glm4MoeMTPModel": (("Glm4MoeForCausalLM",), ".layers.{num_hidden_layers}."),
    "ErnieMTPModel": (("Ernie4_5_MoeForCausalLM",), ".mtp_block."),
    "Qwen3NextMTP": (("Qwen3NextForCausalLM",), "mtp."),
    "Qwen3_5MTP": (("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), "mtp."),
    "Qwen3_5MoeMTP": (("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), "mtp."),
}

# Keys of a config with the number of MTP layers. Qwen3-Next's has none, and one layer.
_NUM_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def is_head(hf_config) -> bool:
    """True if a draft's config, by ``read_draft_config()``, is of a head that level 1 may run."""
    # An EAGLE-3 head may be in its own form or of speculators.
    is_eagle3 = any("eagle3" in name.lower() for name in _architectures(hf_config))
    return is_eagle3 or is_mtp(hf_config)


def is_mtp(hf_config) -> bool:
    return any(name in _MTP_TARGETS for name in _architectures(hf_config))


def _architectures(hf_config) -> list[str]:
    return getattr(hf_config, "architectures", None) or []


def check_head(head: str, hf_config, target_config) -> None:
    """Refuse a head that does not fit the target, or a kind that level 1 cannot run."""
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
    if architecture not in wanted or not is_target:
        raise ValueError(
            f"draft model {model!r}: vLLM would load its MTP layers ({layer}), which fit the model "
            f"itself alone, and the target is {target_config.model!r}, a {architecture}. Name the "
            "target itself, or another draft model."
        )
    text_config = target_config.hf_text_config
    given = {
        key: n for key in _NUM_MTP_LAYERS if (n := getattr(text_config, key, None)) is not None
    }
    key, num_layers = next(iter(given.items()), (_NUM_MTP_LAYERS[0], int(layer == "Qwen3NextMTP")))
    if not num_layers:
        raise ValueError(
            f"draft model {model!r} has no MTP layers ({key} in its config.json), and vLLM runs "
            "models of its kind as a draft by these alone. Use another draft, or leave 'model' out "
            "for prompt lookup."
        )
    if num_layers > 1:
        raise ValueError(
            f"draft model {model!r} has {num_layers} MTP layers ({key}), and level 1 runs models "
            "with one. Use another draft, or leave 'model' out for prompt lookup."
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
    """Return the folder that ``EngineArgs`` puts for a hub name if HF_HUB_OFFLINE is set."""
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
