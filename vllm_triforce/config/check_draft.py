"""Checks of draft models, by their configs and file headers, before the target loads."""

import json
import os
import struct
from pathlib import Path

from vllm_triforce.config.check_head import check_kind
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


# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000


def check_draft_files(folder: str) -> None:
    """Refuse truncated or unreadable safetensors files in a local folder, without reading weights.

    Raises:
        ValueError: a file is truncated or unreadable.
    """
    for path in sorted(Path(folder).glob("*.safetensors")):
        if (fault := _file_fault(path)) is not None:
            raise ValueError(
                f"draft model {folder!r}: {path.name} {fault}. Copy or download the file again, "
                "or leave 'model' out of speculative_config for prompt lookup."
            )


def _file_fault(path: Path) -> str | None:
    """Describe the fault of a safetensors file; None for a complete one."""
    size = os.path.getsize(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return f"has only {size} bytes"
        header_bytes = struct.unpack("<Q", prefix)[0]
        if header_bytes > _MAX_HEADER_BYTES or 8 + header_bytes > size:
            return f"is truncated or not a safetensors file ({size} bytes)"
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has an unreadable header"
    expected = 8 + header_bytes + max(ends, default=0)
    if expected != size:
        return f"should have {expected} bytes and has {size}"
    return None


def read_draft_config(
    draft_model: str,
    trust_remote_code: bool,
    revision: str | None = None,
    code_revision: str | None = None,
):
    """Read the draft's Hugging Face config as vLLM does, which turns some targets into MTP layers.

    Args:
        revision, code_revision: pinned by the user; reading a config may run the draft's code.

    Raises:
        ValueError: the draft does not exist or cannot be read.
    """
    looks_local = os.path.isabs(draft_model) or draft_model.startswith((".", "~"))
    if (looks_local or os.path.exists(draft_model)) and not os.path.isfile(
        os.path.join(draft_model, "config.json")
    ):
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
            code_revision=code_revision,
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
    check_kind(draft_model, draft_hf_config)
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
    if len(layer_types) > 1:
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
