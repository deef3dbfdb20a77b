"""Penalties as vLLM documents them, written to be read."""

from collections.abc import Mapping, Sequence

import torch


def penalized(
    logits: torch.Tensor,  # [len(new), vocab_size]: row n is of what follows the prompt and new[:n]
    prompt: Sequence[int],
    new: Sequence[int],
    params: Mapping,
) -> torch.Tensor:
    """Apply a request's penalties to its logits, [len(new), vocab_size].

    Args:
        new: tokens of its output, of which the last counts for nothing.
    """
    size = logits.shape[-1]
    one_hot = torch.nn.functional.one_hot(torch.tensor(new), size)
    counts = one_hot.cumsum(0) - one_hot  # of what came before
    in_prompt = torch.bincount(torch.tensor(prompt), minlength=size) > 0
    repetition = params.get("repetition_penalty", 1.0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | in_prompt, repeated, logits)
    logits = logits - params.get("frequency_penalty", 0.0) * counts
    return logits - params.get("presence_penalty", 0.0) * (counts > 0)
