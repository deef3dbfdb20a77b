"""The draft as it is loaded: an error that names it, and its first run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_triforce.host.model_pass import PassInput, run_model


@contextmanager
def loading_draft(draft_model: str) -> Iterator[None]:
    """Around vLLM's loader, whose own errors do not say which of the two models they are about.

    Raises:
        RuntimeError: loading failed.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"draft model {draft_model!r} could not be loaded ({type(error).__name__}: {error}); "
            "check its files, or leave 'model' out of speculative_config for prompt lookup"
        ) from error


def warm_up(model: torch.nn.Module, vllm_config, device: torch.device) -> None:
    """Runs a draft once, so that it is compiled before the first request."""
    run_model(model, vllm_config, PassInput.from_rows([[0, 0]], [0], device), None, {})
