"""Heads as level 1's draft: loading, and the states of the target that they read.

A head reads the target's hidden states beside the tokens. EAGLE-3 heads read those before some
layers, which they fuse; MTP layers read those that the target returns.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from vllm_triforce.config import check_draft


def is_head(model: torch.nn.Module) -> bool:
    """True if a loaded draft reads the target's hidden states."""
    return "hidden_states" in inspect.signature(model.forward).parameters


def aux_layers(vllm_config) -> list[int]:
    """Return the target's layers before which the head reads states; none for an MTP layer."""
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    return [] if check_draft.is_mtp(hf_config) else hf_config.eagle_aux_hidden_state_layer_ids


def num_states(vllm_config) -> int:
    """Return the number of states that the head reads of a token."""
    return len(aux_layers(vllm_config)) or 1


def states_read(
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    aux: Sequence[torch.Tensor] | None,
) -> Sequence[torch.Tensor]:
    """Return the states of a pass that a head reads next.

    Args:
        hidden: output of the model, the target or the head.
        aux: further states that it returns; none with an MTP layer.
    """
    return aux or [hidden]


def fusion_of(head: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the projection of a token's states, one after the other, to the head's input."""
    return getattr(head, "combine_hidden_states", _unchanged)


def _unchanged(states: torch.Tensor) -> torch.Tensor:
    return states


def load_head(target: torch.nn.Module, vllm_config) -> torch.nn.Module:
    """Load the head as vLLM's speculators do; it may share the target's embeddings."""
    return load_eagle_model(target, vllm_config)


def emit_states(target: Any, copy: Any, vllm_config) -> None:
    """Make the target, and level 2's copy of it, return the states that the head reads.

    Args:
        copy: the target itself if level 2 has no copy.
    """
    if layers := aux_layers(vllm_config):
        for model in {id(target): target, id(copy): copy}.values():
            model.set_aux_hidden_state_layers(tuple(layers))
