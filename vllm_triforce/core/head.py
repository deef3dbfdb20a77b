"""EAGLE-3 heads as level 1's draft: loading, and the states of the target that they read."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model


def is_head(model: torch.nn.Module) -> bool:
    """True if a loaded draft reads the target's hidden states."""
    return hasattr(model, "combine_hidden_states")


def aux_layers(vllm_config) -> list[int]:
    """Return the target's layers whose states the head reads."""
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    return hf_config.eagle_aux_hidden_state_layer_ids


def load_head(target: torch.nn.Module, vllm_config) -> torch.nn.Module:
    """Load the head as vLLM's speculator for EAGLE does; it may share the target's embeddings."""
    return load_eagle_model(target, vllm_config)


def emit_states(target: Any, copy: Any, vllm_config) -> None:
    """Make the target, and level 2's copy of it, return the states that the head reads.

    Args:
        copy: the target itself if level 2 has no copy.
    """
    for model in {id(target): target, id(copy): copy}.values():
        model.set_aux_hidden_state_layers(tuple(aux_layers(vllm_config)))
