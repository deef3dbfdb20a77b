"""How far two next-token distributions agree: what speculative sampling would accept."""

import torch


def next_token_probs(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    temperature: float,
    top_p: float,
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """What would be drawn from: temperature, then the fewest tokens that make up ``top_p``.

    One-hot at the argmax for a temperature of 0.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    probs = (logits / temperature).softmax(-1)
    if top_p >= 1:
        return probs
    ordered, tokens = probs.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # what came before was enough
    probs = probs.scatter(-1, tokens, ordered.masked_fill(outside, 0.0))
    return probs / probs.sum(-1, keepdim=True)


def acceptance(
    full: torch.Tensor,  # [num_tokens, vocab_size], probabilities
    sparse: torch.Tensor,  # [num_tokens, vocab_size], probabilities
) -> torch.Tensor:  # [num_tokens], between 0 and 1
    """Probability that a token drawn from ``sparse`` is accepted: the sum of min(full, sparse).

    Written as one minus the total variation, so that equal distributions give 1 exactly.
    """
    return (1 - 0.5 * (full - sparse).abs().sum(-1)).clamp_(0.0, 1.0)


def same_argmax(
    full: torch.Tensor,  # [num_tokens, vocab_size]
    sparse: torch.Tensor,  # [num_tokens, vocab_size]
) -> torch.Tensor:  # [num_tokens], bool
    """Whether greedy decoding would accept the token."""
    return full.argmax(-1) == sparse.argmax(-1)
