"""The distribution that a request asks for, as vLLM documents it, written to be read."""

import functools
import math
from collections.abc import Mapping, Sequence

import torch

from tests.models import with_adapter


@functools.cache
def _target(folder: str, adapter: str | None) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    # Grouped products of experts take no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").double()
    return model if adapter is None else with_adapter(model, adapter)


@torch.no_grad()
def target_logits(
    target: str, prompt: Sequence[int], new: Sequence[int], adapter: str | None = None
) -> torch.Tensor:  # [len(new), vocab_size], float64
    """Compute a target's logits of each new token in transformers.

    Args:
        adapter: the folder of a LoRA adapter.
    """
    token_ids = torch.tensor([[*prompt, *new]])
    return _target(target, adapter)(token_ids, logits_to_keep=len(new) + 1).logits[0, :-1]


def shaped(
    logits: torch.Tensor,  # [len(new), vocab_size]: row n is of what follows the prompt and new[:n]
    prompt: Sequence[int],
    new: Sequence[int],
    params: Mapping,
) -> torch.Tensor:  # [len(new), vocab_size]
    """Apply what changes single logits, in the order of vLLM's sampler.

    Args:
        new: tokens of the output, of which the last counts for nothing.
    """
    logits, size = logits.clone(), logits.shape[-1]
    if allowed := params.get("allowed_token_ids"):
        logits = only(logits, allowed)
    for token, bias in dict(params.get("logit_bias", ())).items():
        logits[:, token] += bias
    one_hot = torch.nn.functional.one_hot(torch.tensor(new), size)
    counts = one_hot.cumsum(0) - one_hot  # of what came before
    in_prompt = torch.bincount(torch.tensor(prompt, dtype=torch.int64), minlength=size) > 0
    repetition = params.get("repetition_penalty", 1.0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | in_prompt, repeated, logits)
    logits = logits - params.get("frequency_penalty", 0.0) * counts
    return logits - params.get("presence_penalty", 0.0) * (counts > 0)


def only(logits: torch.Tensor, allowed: Sequence[int]) -> torch.Tensor:
    """Mask all other tokens."""
    masked = torch.full_like(logits, -math.inf)
    masked[..., allowed] = logits[..., allowed]
    return masked


def sampled_from(
    logits: torch.Tensor,  # [num_tokens, vocab_size], float64, shaped
    params: Mapping,
    slack: float = 0.0,
) -> torch.Tensor:  # [num_tokens, vocab_size]
    """Apply temperature, min-p, top-k and top-p, in this order.

    Args:
        slack: lets in what a cut leaves out by less than this.
    """
    size = logits.shape[-1]
    if not params["temperature"]:
        return torch.nn.functional.one_hot(logits.argmax(-1), size).double()
    probs = (logits / params["temperature"]).softmax(-1)
    if min_p := params.get("min_p"):
        probs = probs * (probs >= probs.amax(-1, keepdim=True) * (min_p * (1 - slack)))
    if top_k := params.get("top_k"):
        least = probs.topk(min(top_k, size)).values[:, -1:]
        probs = probs * (probs >= least * (1 - slack))
    probs = probs / probs.sum(-1, keepdim=True)
    if top_p := params.get("top_p"):
        ordered, order = probs.sort(-1, descending=True)
        ordered = ordered * (ordered.cumsum(-1) - ordered < top_p + slack)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs / probs.sum(-1, keepdim=True)
