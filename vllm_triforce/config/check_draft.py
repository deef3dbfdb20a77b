"""What cannot draft for a target, refused by its configuration."""

import os

from vllm_triforce.config.asked import TriForceConfig
from vllm_triforce.config.draft_files import check_draft_files
from vllm_triforce.config.layer_kinds import has_alibi, has_sinks


def read_draft_config(
    draft_model: str,
    trust_remote_code: bool,
    revision: str | None = None,
    code_revision: str | None = None,
):
    """The draft's Hugging Face config; a missing or unreadable draft is refused.

    Args:
        revision, code_revision: what is pinned of the draft: reading a config may run its code.
    """
    looks_local = os.path.isabs(draft_model) or draft_model.startswith((".", "~"))
    if (looks_local or os.path.exists(draft_model)) and not os.path.isfile(
        os.path.join(draft_model, "config.json")
    ):
        raise ValueError(
            f"draft model {draft_model!r} is not a folder with a config.json; correct 'model' in "
            "speculative_config, or leave it out for prompt lookup"
        )
    if os.path.isdir(draft_model):
        check_draft_files(draft_model)
    from vllm.transformers_utils.config import get_config

    try:
        return get_config(
            draft_model,
            trust_remote_code=trust_remote_code,
            revision=revision,
            code_revision=code_revision,
        )
    except Exception as error:
        pinned = f" at revision {revision!r}" if revision is not None else ""
        raise ValueError(
            f"draft model {draft_model!r}{pinned} cannot be read ({error}); correct 'model' in "
            "speculative_config, or leave it out for prompt lookup"
        ) from error


def check_draft(draft_model: str, draft_hf_config, target_config, config: TriForceConfig) -> None:
    """Refuses drafts that cannot draft for the target, from their configs alone."""
    text_config = draft_hf_config.get_text_config()
    draft_vocab, target_vocab = text_config.vocab_size, target_config.get_vocab_size()
    if draft_vocab != target_vocab:
        raise ValueError(
            f"draft model {draft_model!r} has a vocabulary of {draft_vocab} tokens, the target "
            f"{target_config.model!r} one of {target_vocab}; use a draft with the target's "
            "tokenizer, or leave 'model' out for prompt lookup"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and config.window_tokens > positions:
        raise ValueError(
            f"num_sink_tokens={config.num_sink_tokens} and num_recent_tokens="
            f"{config.num_recent_tokens} make a window of {config.window_tokens} tokens, more than "
            f"the {positions} positions of draft model {draft_model!r}; lower num_recent_tokens"
        )


def check_draft_kind(draft_config, is_cpu: bool) -> None:
    """Refuses drafts whose layers cannot have a window of their own."""
    if draft_config.use_mla or draft_config.is_hybrid or draft_config.is_attention_free:
        raise ValueError(
            f"draft model {draft_config.model!r} must have plain attention (no MLA, no state "
            "space): level 1 gives it a window of its own; use another draft"
        )
    kinds = set(getattr(draft_config.hf_text_config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise ValueError(
            f"draft model {draft_config.model!r} has layers of the kinds "
            f"{', '.join(sorted(kinds))}, and level 1's window is of one; use a draft whose layers "
            "are alike, or leave 'model' out for prompt lookup"
        )
    if not is_cpu and (has_alibi(draft_config) or has_sinks(draft_config)):
        raise ValueError(
            f"draft model {draft_config.model!r} has ALiBi or attention sinks, which level 1's "
            "window does not fit on a GPU; use another draft"
        )
