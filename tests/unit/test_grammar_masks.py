"""Promise: beside speculation a grammar's masks are vLLM's, and neither more memory nor slower
where nobody has drafts."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_triforce.runner_v2.rejection import bound_grammar_masks
from vllm_triforce.scheduler.grammar_masks import GrammarMaskMixin

MAX_NUM_SEQS = 200
NUM_DRAFTS = 32


class Grammar:
    """Allows the tokens that come next in a text of its own."""

    def __init__(self, number: int) -> None:
        self._number, self._place = number, 0
        self.threads: set[int] = set()

    def is_terminated(self) -> bool:
        return False

    def fill_bitmask(self, masks, row: int) -> None:
        self.threads.add(threading.get_ident())
        masks[row] = torch.tensor([self._number, self._place])

    def accept_tokens(self, request_id, tokens) -> bool:
        self._place += len(tokens)
        return True

    def rollback(self, count: int) -> None:
        self._place -= count


def manager_of(num_speculative_tokens: int) -> StructuredOutputManager:
    """Make vLLM's manager, with masks of 64 tokens."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS),
        model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        structured_outputs_config=SimpleNamespace(enable_in_reasoning=True),
        num_speculative_tokens=num_speculative_tokens,
    )
    manager = StructuredOutputManager(config)
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.zeros(rows, 2, dtype=torch.int32),
        destroy=lambda: None,
    )
    return manager


class Stock:
    """vLLM's scheduler as far as it makes masks."""

    get_grammar_bitmask = Scheduler.get_grammar_bitmask

    def __init__(self, manager: StructuredOutputManager, num_requests: int) -> None:
        self.structured_output_manager, self.vllm_config = manager, manager.vllm_config
        self.requests = {
            str(number): SimpleNamespace(
                use_structured_output=True,
                is_prefill_chunk=False,
                structured_output_request=SimpleNamespace(grammar=Grammar(number)),
            )
            for number in range(num_requests)
        }

    def masks(self, drafts: dict[str, list[int]]) -> np.ndarray:
        step = SimpleNamespace(
            has_structured_output_requests=True,
            num_scheduled_tokens=dict.fromkeys(self.requests, 1),
            scheduled_spec_decode_tokens=drafts,
        )
        return self.get_grammar_bitmask(step).grammar_bitmask.copy()

    @property
    def threads(self) -> set[int]:
        """Return the threads that filled masks since the last call."""
        found: set[int] = set()
        for request in self.requests.values():
            grammar = request.structured_output_request.grammar
            found |= grammar.threads
            grammar.threads = set()
        return found


class Ours(GrammarMaskMixin, Stock):
    pass


@pytest.fixture
def schedulers():
    managers = [manager_of(NUM_DRAFTS), manager_of(NUM_DRAFTS)]
    yield Stock(managers[0], MAX_NUM_SEQS), Ours(managers[1], MAX_NUM_SEQS)
    for manager in managers:
        manager.clear_backend()


def test_masks_are_as_many_as_without_speculation_until_somebody_drafts(schedulers):
    stock, ours = schedulers
    own, manager = {threading.get_ident()}, ours.structured_output_manager
    sizes = []
    for drafts in ({}, {"3": [7, 8, -1]}, {str(n): [5] * NUM_DRAFTS for n in range(20)}, {}):
        assert np.array_equal(ours.masks(drafts), stock.masks(drafts))
        # vLLM's never fills in parallel once speculation is configured.
        assert stock.threads == own
        assert (ours.threads == own) == bool(drafts)
        sizes.append(len(manager._grammar_bitmask))
    # 640 drafts take four rows more for each of 200 requests, where vLLM has 32.
    assert sizes == [MAX_NUM_SEQS, 2 * MAX_NUM_SEQS, 5 * MAX_NUM_SEQS, 5 * MAX_NUM_SEQS]
    assert manager.vllm_config.model_config is ours.vllm_config.model_config


def test_masks_on_the_device_are_for_those_that_are_speculated_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    held = []

    def apply(self, logits, input_batch, names, masks):
        held.append(self.grammar_bitmask[: len(masks)].shape)

    monkeypatch.setattr(StructuredOutputsWorker, "apply_grammar_bitmask", apply)
    its = StructuredOutputsWorker(1024 * 13, 320, torch.device("cpu"), 13, 1)
    runner = SimpleNamespace(
        structured_outputs_worker=its, max_num_reqs=1024, num_speculative_steps=12
    )
    bound_grammar_masks(runner, SimpleNamespace(max_speculating_seqs=64))
    masks = runner.structured_outputs_worker
    assert masks.grammar_bitmask.shape == (1024 + 64 * 12, 10)
    # vLLM's own scheduler has as many tokens of every request verified.
    for rows in (1024 + 64 * 12, 1024 * 13):
        masks.apply_grammar_bitmask(None, None, ["a"], np.zeros((rows, 10), dtype=np.int32))
    assert held == [(1024 + 64 * 12, 10), (1024 * 13, 10)]
