"""Record every context once, replay it by every policy, and compare next-token distributions."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import TopPLogitsWarper

from vllm_triforce_bench.lab.contexts import Context
from vllm_triforce_bench.lab.policies import POLICIES
from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.target import Target


def query_key_pairs(context: Context) -> int:
    """Work on a context, for a progress bar."""
    length = len(context.prompt)
    num_replays = 1 + len({(r.copy, r.policy, r.sizes) for r in context.replays})
    return length * length // 2 + num_replays * context.num_replayed * length


def measure_context(
    target: Target,
    context: Context,
    settings: LabSettings,
    advance: Callable[[int], None] = lambda pairs: None,
) -> Iterator[dict]:
    """Yield a row of figures for each replay.

    Args:
        advance: takes the query-key pairs done.
    """
    done = 0

    def recorded(tokens: int) -> None:
        nonlocal done
        advance((done + tokens) ** 2 // 2 - done**2 // 2)
        done += tokens

    draw = partial(_draw, settings, torch.Generator().manual_seed(settings.seed + context.stretch))
    trace = target.record(context.prompt, context.replayed, recorded, draw)
    pairs = len(trace.replayed) * trace.start
    full_logits, _ = target.replay(trace, None)
    greedy = full_logits.argmax(-1)
    full = next_token_probs(full_logits, settings.temperature, settings.top_p)
    advance(pairs)
    measured: dict[tuple, dict] = {}
    for replay in context.replays:
        key = (replay.copy, replay.policy, replay.sizes)
        if key not in measured:
            policy = POLICIES[replay.policy](replay.sizes)
            logits, sparse = target.replay(trace, policy, replay.copy)
            probs = next_token_probs(logits, settings.temperature, settings.top_p)
            measured[key] = dict(
                greedy_agreement=float((logits.argmax(-1) == greedy).float().mean()),
                acceptance=float(acceptance(full, probs).mean()),
                kept_mass=sparse.kept_mass,
                tokens_read=sparse.tokens_read,
            )
            advance(pairs)
        yield dict(
            experiment=replay.experiment,
            policy=replay.label,
            budget=replay.sizes.budget,
            chunk_size=replay.sizes.chunk_size,
            recent_tokens=replay.sizes.recent_tokens,
            refresh_interval=replay.sizes.refresh_interval,
            context=trace.start,
            stretch=context.stretch,
            replayed_tokens=len(trace.replayed),
            **measured[key],
        )


def _draw(settings: LabSettings, generator: torch.Generator, logits: torch.Tensor) -> int:
    """Draw the next token from logits [vocab_size], the most probable one for a greedy replay."""
    temperature = settings.temperature if settings.replay == "sample" else 0.0
    probs = next_token_probs(logits[None], temperature, settings.top_p)[0]
    return int(torch.multinomial(probs.cpu(), 1, generator=generator))


# Agreement of two next-token distributions.


def next_token_probs(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    temperature: float,
    top_p: float,
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """Distribution to sample from: temperature, then the fewest tokens that make up ``top_p``.

    One-hot at the argmax for a temperature of 0.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / temperature
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(torch.empty(0, dtype=torch.long), logits)
    return logits.softmax(-1)


def acceptance(
    full: torch.Tensor,  # [num_tokens, vocab_size], probabilities
    sparse: torch.Tensor,  # [num_tokens, vocab_size], probabilities
) -> torch.Tensor:  # [num_tokens], between 0 and 1
    """Probability that a token drawn from ``sparse`` is accepted, the sum of min(full, sparse).

    Computed as one minus the total variation: equal distributions give exactly 1.
    """
    return (1 - 0.5 * (full - sparse).abs().sum(-1)).clamp_(0.0, 1.0)
