"""A fault that was there once, put back, and streams that can show it.

Each token's distribution as it is handed up is that of the token before it in the batch, where a
greedy request's are certain.
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


@contextmanager
def fault(is_there: bool):
    """Hand up the rows shifted by one, or as they should be."""
    take = DraftProbsStore.take

    def shifted(store, *step) -> torch.Tensor | None:
        rows = take(store, *step)
        return None if rows is None else rows.roll(1, 0)

    with mock.patch.object(DraftProbsStore, "take", shifted) if is_there else nullcontext():
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
