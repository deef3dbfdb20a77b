"""Placeholder drafts that vLLM's scheduler gives requests without drafts, removed from a step.

To keep a batch uniform for CUDA graphs, vLLM gives a new or resumed request with a single token to
compute ``num_speculative_tokens`` drafts of -1 (``pad_spec_decode`` in
vllm/v1/core/sched/scheduler.py). Examples are a prompt of one token, or one cached except for its
last token. Model Runner V1 on the CPU has no such graphs and computes all of them. vLLM's kernel
there reads the probability before the row to decide on a sampled -1 (patches/README.md).
``LookaheadMixin`` prevents placeholders; a scheduler of the user's, or of a newer vLLM, adds some.
"""

import dataclasses
from typing import Any

PLACEHOLDER = -1


def without_placeholders(scheduler_output) -> tuple[Any, dict[str, int]]:
    """Return a step without placeholders, and their numbers by request id.

    The scheduler keeps its own step, and counts the missing placeholders as rejected.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    padded = {i: len(tokens) for i, tokens in scheduled.items() if tokens[:1] == [PLACEHOLDER]}
    if not padded:
        return scheduler_output, padded
    counts = {i: n - padded.get(i, 0) for i, n in scheduler_output.num_scheduled_tokens.items()}
    step = dataclasses.replace(
        scheduler_output,
        scheduled_spec_decode_tokens={i: ids for i, ids in scheduled.items() if i not in padded},
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )
    return step, padded


def drop_placeholder_rows(grammar_output, scheduled: dict[str, list[int]], dropped: dict[str, int]):
    """Remove the placeholders' rows from a step's grammar bitmask of one row per token.

    Args:
        grammar_output: vLLM's; None if no request has a grammar.
        scheduled: remaining drafts, by request id.
    """
    if grammar_output is None or not dropped:
        return grammar_output
    kept: list[int] = []
    start = 0
    for request_id in grammar_output.structured_output_request_ids:
        count = 1 + len(scheduled.get(request_id, ()))
        kept += range(start, start + count)
        start += count + dropped.get(request_id, 0)
    return dataclasses.replace(grammar_output, grammar_bitmask=grammar_output.grammar_bitmask[kept])
