"""A fault that was there once, put back, and streams that can show it.

Width of the distributions that are handed up taken from the distributions, not from the tokens:
a greedy request of a mixed batch has fewer, so that all later requests of the batch were tested
against rows that are not theirs, or against memory behind the last one. What lies there is chance,
and zeros do no harm: here it is a distribution of equal probabilities.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from tests.fuzz.judge import Judge, Running
from vllm_triforce.runner_v1.draft_probs import DraftProbsStore

SETTINGS = {
    "model": "small",
    "lora": False,
    "engine": {
        "block_size": 32,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 8 * 25,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
        "seed": 0,
    },
    "triforce": {
        "retrieval_budget": 128,
        "min_context": 0,
        "num_sink_tokens": 4,
        "num_recent_tokens": 60,
        "refresh_interval": 3,
        "draft": "model",
        "num_speculative_tokens": 6,
        "gamma": 2,
        "adaptive": False,
        "levels": "1,2,3",
    },
}


def mixed_stream(number: int) -> list[dict]:
    """A greedy request in the batch's first row, and behind it sampled ones that are near their
    ends, so that their proposals are shorter than its own."""
    length = 256 + 4 + number % 8
    prompt = {"kind": "text", "start": 37 * number % 7000, "length": length, "shared": 256}
    greedy = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    sampled = {"max_tokens": 5, "temperature": 1.0, "ignore_eos": True, "n": 4}
    requests = [greedy] + [sampled] * 10
    return [{"prompt": prompt, "params": params, "arrive": 0} for params in requests]


def _faulty_take(self: DraftProbsStore, request_ids, num_drafts, token_ids) -> torch.Tensor | None:
    known = [self._proposals[name].probs for name in request_ids if name in self._proposals]
    if not known:
        return None
    width = max(map(len, known))  # should be that of the tokens
    kept, start = [], 0
    for name, count in zip(request_ids, num_drafts):
        tokens = token_ids[start : start + count]
        start += count
        rows = self._rows(name, tokens) if count else []
        kept += list(zip(tokens, rows))[:width]
    return self._lay_out([row for _, row in kept], [token for token, _ in kept])


def _with_memory_behind(
    self: DraftProbsStore, request_ids, num_drafts, token_ids
) -> torch.Tensor | None:
    rows = _faulty_take(self, request_ids, num_drafts, token_ids)
    if rows is None:
        return None
    behind = rows.new_full((sum(num_drafts) - len(rows), rows.shape[1]), 1 / rows.shape[1])
    return torch.cat([rows, behind])


@contextmanager
def fault(is_there: bool, memory_behind: bool = False):
    """The rows as they were laid out, or as they should be.

    Args:
        memory_behind: whether what is read behind them is known.
    """
    take = _with_memory_behind if memory_behind else _faulty_take
    with mock.patch.object(DraftProbsStore, "take", take) if is_there else nullcontext():
        yield


def streams_until_caught(
    running: Running, number: int, most: int, least_p_value: float, watches_boundary: bool
) -> tuple[int | None, Judge]:
    """Streams until a check other than greedy ones says that something is wrong."""
    judge = Judge(watches_boundary=watches_boundary, compares_greedy=False, compares_alone=False)
    for i in range(most):
        faults = judge.check(running, mixed_stream(number * most + i), number * most + i)
        unseeded = judge.distribution.pools["without seed"]
        if faults or unseeded.p_value() < least_p_value:
            return i + 1, judge
    return None, judge
