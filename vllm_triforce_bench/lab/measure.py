"""Records every context once, replays it by every policy, and makes a row of each replay."""

from collections.abc import Callable, Iterator

import torch

from vllm_triforce_bench.lab.agreement import acceptance, next_token_probs, same_argmax
from vllm_triforce_bench.lab.contexts import Context
from vllm_triforce_bench.lab.policies import POLICIES
from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.target import Target


def query_key_pairs(context: Context) -> int:
    """Size of the work on a context, for a progress bar."""
    length = len(context.prompt)
    count = context.replayed if isinstance(context.replayed, int) else len(context.replayed)
    replays = 1 + len({(r.policy, r.sizes) for r in context.replays})
    return length * length // 2 + replays * count * length


def measure_context(
    target: Target,
    context: Context,
    settings: LabSettings,
    advance: Callable[[int], None] = lambda pairs: None,
) -> Iterator[dict]:
    """One row of numbers per replay.

    Args:
        advance: told the query-key pairs that are done.
    """
    done = 0

    def recorded(tokens: int) -> None:
        nonlocal done
        advance((done + tokens) ** 2 // 2 - done**2 // 2)
        done += tokens

    with_mass = any(POLICIES[replay.policy].needs_mass for replay in context.replays)
    trace = target.record(context.prompt, context.replayed, with_mass, recorded)
    pairs = len(trace.replayed) * trace.start
    full_logits, _ = target.replay(trace, None)
    full = next_token_probs(full_logits, settings.temperature, settings.top_p)
    advance(pairs)
    measured: dict[tuple, dict] = {}
    for replay in context.replays:
        key = (replay.policy, replay.sizes)
        if key not in measured:
            policy = POLICIES[replay.policy](replay.sizes)
            logits, sparse = target.replay(trace, policy)
            probs = next_token_probs(logits, settings.temperature, settings.top_p)
            measured[key] = dict(
                greedy_agreement=float(same_argmax(full_logits, logits).float().mean()),
                acceptance=float(acceptance(full, probs).mean()),
                kept_mass=sparse.kept_mass,
                tokens_read=sparse.tokens_read,
                **_answer_figures(context, full_logits, logits),
            )
            advance(pairs)
        yield dict(
            experiment=replay.experiment,
            policy=replay.policy,
            budget=replay.sizes.budget,
            chunk_size=replay.sizes.chunk_size,
            recent_tokens=replay.sizes.recent_tokens,
            refresh_interval=replay.sizes.refresh_interval,
            context=trace.start,
            stretch=context.stretch,
            needle_depth=context.needle_depth,
            replayed_tokens=len(trace.replayed),
            **measured[key],
        )


def _answer_figures(context: Context, full: torch.Tensor, sparse: torch.Tensor) -> dict:
    """How probable the needle's answer is, token by token: geometric means and greedy hits."""
    if context.answer is None:
        return {}
    answer = torch.tensor(context.answer, device=full.device)[:, None]
    figures = {}
    for name, logits in (("full", full), ("sparse", sparse)):
        log_probs = logits.float().log_softmax(-1).gather(-1, answer)
        figures[f"answer_probability_{name}"] = float(log_probs.mean().exp())
        figures[f"answer_hits_{name}"] = float(
            (logits.argmax(-1, keepdim=True) == answer).float().mean()
        )
    return figures
