"""Record every context once, replay it by every policy, and compare next-token distributions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import TopPLogitsWarper

from vllm_triforce_bench.lab.policies import POLICIES
from vllm_triforce_bench.lab.settings import LabSettings, Replayed
from vllm_triforce_bench.lab.target import Target


@dataclass(frozen=True)
class Context:
    """One recording and its replays.

    Args:
        replayed: tokens that follow the prompt, or the number of the target's own.
    """

    prompt: list[int]
    replayed: list[int] | int
    replays: list[Replayed]
    stretch: int


def read_contexts(tokenizer, settings: LabSettings) -> list[Context]:
    """Cut the texts into stretches, and list every recording of the run, the shortest first.

    Every context ends at the end of its stretch: contexts of all lengths replay the same tokens.

    Raises:
        ValueError: a text is too short for the longest context.
    """
    special = tokenizer.encode("")
    prefix = [] if special == [tokenizer.eos_token_id] else special  # T5-like ones end with it
    texts: list[list[int]] = []
    for path in settings.text:
        texts.append(tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False))
        if len(texts[-1]) < settings.num_tokens:
            raise ValueError(
                f"text {str(path)!r} has {len(texts[-1])} tokens, fewer than the "
                f"{settings.num_tokens} of the longest context and its replay; use a longer text "
                "or shorter contexts"
            )
    # One copy of the target at a time is in memory.
    replays = sorted(settings.replays(), key=lambda each: settings.copies.index(each.copy))
    contexts = []
    for length in sorted({replay.context for replay in replays}):
        for stretch in range(settings.stretches):
            # Of each text, ends of prompts are spread evenly.
            turn, number = divmod(stretch, len(texts))
            num_turns, ids = len(range(number, settings.stretches, len(texts))), texts[number]
            room = len(ids) - settings.num_tokens
            last = len(ids) - settings.replay_tokens - 1
            end = last - (num_turns - 1 - turn) * room // max(1, num_turns - 1)
            prompt = [*prefix, *ids[end - length + len(prefix) : end]]
            count = settings.replay_tokens
            replayed = ids[end : end + count] if settings.replay == "text" else count
            at_length = [replay for replay in replays if replay.context == length]
            contexts.append(Context(prompt, replayed, at_length, stretch))
    return contexts


def measure_context(target: Target, context: Context, settings: LabSettings) -> Iterator[dict]:
    draw = partial(_draw, settings, torch.Generator().manual_seed(settings.seed + context.stretch))
    trace = target.record(context.prompt, context.replayed, draw)
    full_logits, _ = target.replay(trace, None)
    greedy = full_logits.argmax(-1)
    full = next_token_probs(full_logits, settings.temperature, settings.top_p)
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
        yield dict(
            experiment=replay.experiment,
            policy=replay.label,
            budget=replay.sizes.budget,
            chunk_size=replay.sizes.chunk_size,
            recent_tokens=replay.sizes.recent_tokens,
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
