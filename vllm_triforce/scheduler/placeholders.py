"""Drafts that vLLM's scheduler invents for a request that has none.

So that a step's batch stays uniform for CUDA graphs, a request that comes, or comes back, with a
single token to compute is given ``num_speculative_tokens`` drafts of -1 (``pad_spec_decode`` in
vllm/v1/core/sched/scheduler.py): a prompt of one token, one that is cached but for its last token,
a resumed request. Model Runner V1 on the CPU has no such graphs, computes them all, and vLLM's
kernel there accepts a -1 of a sampled request by the probability that lies before the row
(patches/README.md).
"""

import dataclasses

PLACEHOLDER = -1


def _padded(scheduled: dict[str, list[int]]) -> dict[str, int]:
    """Requests whose drafts are placeholders, and how many they have."""
    return {
        request_id: len(tokens)
        for request_id, tokens in scheduled.items()
        if tokens and tokens[0] == PLACEHOLDER
    }


def drop_placeholders(scheduler_output) -> None:
    """Takes them out of a step that is only being scheduled."""
    for request_id, count in _padded(scheduler_output.scheduled_spec_decode_tokens).items():
        del scheduler_output.scheduled_spec_decode_tokens[request_id]
        scheduler_output.num_scheduled_tokens[request_id] -= count
        scheduler_output.total_num_scheduled_tokens -= count


def without_placeholders(scheduler_output) -> tuple[object, dict[str, int]]:
    """The step without them, for a worker: a scheduler that is not ours has counted on them, and
    takes those that do not come back for rejected.

    Returns:
        The step, and how many were taken from whom.
    """
    padded = _padded(scheduler_output.scheduled_spec_decode_tokens)
    if not padded:
        return scheduler_output, {}
    step = dataclasses.replace(
        scheduler_output,
        scheduled_spec_decode_tokens=dict(scheduler_output.scheduled_spec_decode_tokens),
        num_scheduled_tokens=dict(scheduler_output.num_scheduled_tokens),
    )
    drop_placeholders(step)
    return step, padded


def without_their_rows(grammar_output, scheduled: dict[str, list[int]], dropped: dict[str, int]):
    """What grammars allow in a step, a row for each token of their requests, without the rows that
    the scheduler made for placeholders.

    Args:
        grammar_output: vLLM's; None where no request has a grammar.
        scheduled: drafts that are left, by request.
        dropped: placeholders that were taken, by request.
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
