"""Promise: beside speculation a grammar's masks take neither more memory nor time where nobody has
drafts. What they allow is said in tests/parity."""

import threading
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_triforce.runner_v2.rejection import bound_grammar_masks
from vllm_triforce.scheduler.grammar_masks import GrammarMaskMixin

MAX_NUM_SEQS = 200
NUM_DRAFTS = 32


class Stock:
    """vLLM's scheduler as far as it makes masks, for requests of one grammar."""

    get_grammar_bitmask = Scheduler.get_grammar_bitmask

    def __init__(self, grammar) -> None:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS),
            model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
            structured_outputs_config=SimpleNamespace(enable_in_reasoning=True),
            num_speculative_tokens=NUM_DRAFTS,
        )
        self.vllm_config, self.structured_output_manager = config, StructuredOutputManager(config)
        self.structured_output_manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda rows: torch.zeros(rows, 2, dtype=torch.int32),
            destroy=lambda: None,
        )
        request = SimpleNamespace(
            use_structured_output=True,
            is_prefill_chunk=False,
            structured_output_request=SimpleNamespace(grammar=grammar),
        )
        self.requests = {str(number): request for number in range(MAX_NUM_SEQS)}


class Ours(GrammarMaskMixin, Stock):
    pass


def test_masks_are_as_many_as_without_speculation_until_somebody_drafts():
    """vLLM's are never filled in parallel once speculation is configured."""
    threads, sizes = set(), []
    grammar = SimpleNamespace(
        is_terminated=lambda: False,
        fill_bitmask=lambda masks, row: threads.add(threading.get_ident()),
        accept_tokens=lambda request_id, tokens: True,
        rollback=lambda count: None,
    )
    ours = Ours(grammar)
    manager = ours.structured_output_manager
    for drafts in ({}, {"3": [7, 8, -1]}, {str(n): [5] * NUM_DRAFTS for n in range(20)}, {}):
        step = SimpleNamespace(
            has_structured_output_requests=True,
            num_scheduled_tokens=dict.fromkeys(ours.requests, 1),
            scheduled_spec_decode_tokens=drafts,
        )
        threads.clear()
        masks = ours.get_grammar_bitmask(step).grammar_bitmask
        assert len(masks) == MAX_NUM_SEQS + sum(map(len, drafts.values()))
        assert (threads == {threading.get_ident()}) == bool(drafts)
        sizes.append(len(manager._grammar_bitmask))
    manager.clear_backend()
    # 640 drafts take four rows more for each of 200 requests, where vLLM has 32.
    assert sizes == [MAX_NUM_SEQS, 2 * MAX_NUM_SEQS, 5 * MAX_NUM_SEQS, 5 * MAX_NUM_SEQS]


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
