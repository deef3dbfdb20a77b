"""What is loaded: first what is cheap and can be refused, the weights last."""

from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.target import Target

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def load_config_and_tokenizer(settings: LabSettings) -> tuple:
    """The model's config and tokenizer, of transformers.

    Raises:
        ValueError: there is no such model, or the lab cannot run it.
    """
    from transformers import AutoConfig, AutoTokenizer

    keys = dict(revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(settings.model, **keys)
        check_config(config, settings)
        return config, AutoTokenizer.from_pretrained(settings.model, **keys)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {settings.model!r} cannot be read ({reason}); give a folder with a "
            "transformers checkpoint and its tokenizer, or a name of the hub"
        ) from error


def check_config(config, settings: LabSettings) -> None:
    """Raises ValueError where the lab cannot run such a model, or not so far."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model {settings.model!r} is an encoder-decoder; the lab replays causal language "
            "models only"
        )
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise ValueError(
            f"model {settings.model!r} has layers of type {', '.join(sorted(unknown))}; the lab "
            "knows full and sliding-window attention only"
        )
    limit = getattr(text, "max_position_embeddings", None)
    needed = settings.longest_context + settings.replay_tokens + 1
    if limit is not None and needed > limit:
        raise ValueError(
            f"the longest context of {settings.longest_context} and its replay need {needed} "
            f"positions, and model {settings.model!r} has {limit}; use shorter --context and "
            "--contexts"
        )


def check_device(device: str) -> None:
    """Raises ValueError where torch has no such device."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used ({reason}); use cpu or cuda") from error


def load_target(settings: LabSettings) -> Target:
    """The weights.

    Raises:
        RuntimeError: the model's attention cannot be stood in for.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        settings.model,
        dtype=getattr(torch, settings.dtype),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    return Target(model.to(settings.device))
