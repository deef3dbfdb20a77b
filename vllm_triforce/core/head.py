"""EAGLE-3 heads as level 1's draft: loading, and the states of the target that they read."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model


def is_head(model: torch.nn.Module) -> bool:
    """True if a loaded draft reads the target's hidden states."""
    return hasattr(model, "combine_hidden_states")


def num_aux_states(head: Any) -> int:
    """Return the number of the target's layers whose states a head reads."""
    return head.model.num_aux_hidden_states


def load_head(target: torch.nn.Module, vllm_config) -> torch.nn.Module:
    """Load the head as vLLM's speculator for EAGLE does; it may share the target's embeddings."""
    return load_eagle_model(target, vllm_config)


def emit_states(target: Any, copy: Any, vllm_config) -> None:
    """Make the target, and level 2's copy of it, return the states that the head reads.

    Args:
        copy: the target itself if level 2 has no copy.
    """
    layers = get_eagle3_aux_layers_from_config(vllm_config.speculative_config)
    layers = layers or target.get_eagle3_default_aux_hidden_state_layers()
    for model in {id(target): target, id(copy): copy}.values():
        model.set_aux_hidden_state_layers(layers)
