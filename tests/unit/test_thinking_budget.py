"""Promise: beside whatever others propose, a request's reasoning is ended where stock vLLM ends it
that has no speculation."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_triforce.core.limits import decodes_plainly
from vllm_triforce.runner_v1.rejection import PlainThinkingBudget

CPU = torch.device("cpu")
VOCAB, LENGTH = 8, 42
START, END = 1, 2
FORCED = 1e9


def config(start: list[int], end: list[int]):
    return SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)


def with_requests(holder, prompts: list[list[int]], budgets: list[int | None]):
    """Return the holder with a batch, and the batch's outputs."""
    outputs: list[list[int]] = [[] for _ in prompts]
    added = [
        (row, SimpleNamespace(thinking_token_budget=budget), prompt, output)
        for row, (prompt, budget, output) in enumerate(zip(prompts, budgets, outputs))
    ]
    holder.sync_batch(BatchUpdate(len(prompts), removed=[], added=added, moved=[]))
    return holder, outputs


def forced_tokens(logits: torch.Tensor) -> list[int | None]:
    """Return the forced token of each row, which is at most one."""
    assert (logits == FORCED).sum(1).le(1).all()
    return [int(row.argmax()) if row.max() == FORCED else None for row in logits]


def stocks(reasoning, prompts, budgets, liked) -> list[list[int]]:
    """Run vLLM's holder without speculation, a token of each request a step."""
    holder = ThinkingBudgetStateHolder(reasoning, len(prompts), 0, CPU, False)
    holder, outputs = with_requests(holder, prompts, budgets)
    nothing: list[list[int]] = [[] for _ in prompts]
    for tokens in zip(*liked):
        holder.update_state(outputs, nothing)
        logits = holder.apply_to_logits(torch.zeros(len(prompts), VOCAB), False, nothing)
        for output, token, forced in zip(outputs, tokens, forced_tokens(logits)):
            output.append(token if forced is None else forced)
    return outputs


def speculated(holder, prompts, budgets, liked, draw) -> list[list[int]]:
    """A token a step of each request with a budget, up to six of the others."""
    holder, outputs = with_requests(holder, prompts, budgets)
    length = len(liked[0])
    while min(map(len, outputs)) < length:
        drafts = [
            tokens[len(output) :][: draw.randrange(6)] if budget is None else []
            for tokens, output, budget in zip(liked, outputs, budgets)
        ]
        holder.update_state(outputs, drafts)
        logits = torch.zeros(len(prompts), VOCAB)
        forced = forced_tokens(holder.apply_to_logits(logits, any(drafts), drafts))
        for output, tokens, accepted, token in zip(outputs, liked, drafts, forced):
            output += accepted
            wanted = tokens[len(output)] if len(output) < length else 0
            output.append(wanted if token is None else token)
    return [output[:length] for output in outputs]


@pytest.mark.parametrize(
    ("start", "end"), [([START], [END]), ([START], [5, 6, END]), ([START, 3], [END, END])], ids=str
)
def test_forces_the_tokens_that_stock_forces(start, end):
    """Budgets up to 33 in every row of batches of one to four, beside requests without."""
    reasoning, draw = config(start, end), random.Random(len(start) + 10 * len(end))
    num_forced = 0
    for budget in range(0, 34, 3):
        for size in range(1, 5):
            prompts = [
                [4] * 3 + (start + [4] * draw.randrange(4) if draw.random() < 0.6 else [])
                for _ in range(size)
            ]
            liked = [[draw.choice((3, 4, 5, 6, 7, 7)) for _ in range(LENGTH)] for _ in range(size)]
            for tokens in liked:  # it thinks, and again
                for place in draw.sample(range(LENGTH), 2):
                    tokens[place : place + len(start)] = start
                if draw.random() < 0.3:
                    place = draw.randrange(LENGTH)
                    tokens[place : place + len(end)] = end
                del tokens[LENGTH:]
            budgets = [(budget + 7 * row) % 34 for row in range(size)]
            budgets[draw.randrange(size)] = draw.choice((budget, None))
            holder = PlainThinkingBudget(reasoning, size, 0, CPU, False)
            found = speculated(holder, prompts, budgets, liked, draw)
            wanted = stocks(reasoning, prompts, budgets, liked)
            assert found == wanted
            num_forced += wanted != liked
    assert num_forced > 30


def test_a_row_forgets_its_former_request():
    reasoning = config([START], [END])
    holder = PlainThinkingBudget(reasoning, 2, 0, CPU, False)
    holder, outputs = with_requests(holder, [[4, START], [4, START]], [3, None])
    outputs[1] += [7, 7, 7]
    moved = [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]
    holder.sync_batch(BatchUpdate(1, removed=[], added=[], moved=moved))
    assert not holder.has_tracked_requests()


def test_requests_with_a_budget_are_not_speculated_on():
    assert decodes_plainly(SamplingParams(thinking_token_budget=0))
    assert not decodes_plainly(SamplingParams())
