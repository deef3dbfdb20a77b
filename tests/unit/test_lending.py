"""Promise: blocks that are lent to drafts are back before somebody waits for them, drafts take of a
step what prompts leave, and whether one is verified does not depend on those behind it."""

from concurrent.futures import Future

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.unit.stepping import BLOCK, DRAFT, STOP, TOKEN, add, num_held, scheduler, step
from vllm_triforce.scheduler.v1 import TriForceScheduler


@pytest.mark.parametrize("num_drafts", range(1, 33))
def test_a_longer_draft_is_not_cut_to_less_than_a_shorter_one_keeps(num_drafts):
    """A sampled draft's length depends on its tokens, so a cut by length is biased."""
    its = scheduler(8)
    add(its, "a", [5] * 60)  # four blocks, with room for three drafts
    step(its, num_drafts=num_drafts)
    assert num_held(its, "a") > 4
    add(its, "b", [6] * 40)  # three blocks, so that one is left
    output = step(its)
    assert output.num_scheduled_tokens["b"] == 40
    verified = len(output.scheduled_spec_decode_tokens["a"])
    assert verified == min(num_drafts, 3 + BLOCK)


def test_a_plain_token_in_a_lent_block_keeps_its_place():
    its = scheduler(8, num_drafts=8)
    add(its, "a", [5] * 29)
    add(its, "b", [5] * 30)
    step(its)
    assert num_held(its, "a") == num_held(its, "b") == 3
    add(its, "c", [6] * 31, logprob_token_ids=[1])  # it speculates never
    step(its)
    step(its)
    # Now b and c need a third block each, and a one for drafts alone.
    output = step(its)
    assert not output.preempted_req_ids
    assert output.num_scheduled_tokens.keys() == {"a", "b", "c"}
    assert "a" not in output.scheduled_spec_decode_tokens


@pytest.mark.parametrize("mode, block_size", [("none", 1024), ("align", BLOCK)])
def test_states_are_not_taken_back(mode, block_size):
    """One of them is that of the last accepted token."""
    states = MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=8,
    )
    its = scheduler(40, num_drafts=8, more_specs=[states], max_num_batched_tokens=1024)
    add(its, "a", [5] * 30)
    step(its, num_drafts=8)
    held = its.kv_cache_manager.get_block_ids("a")
    assert len(held[0]) == 3
    free = its.kv_cache_manager.block_pool.get_num_free_blocks()
    # With the block of attention that is lent to a, it has room beside its own states.
    add(its, "b", [6] * (BLOCK * (free + 1 - 9) - 1))
    output = step(its)
    assert output.triforce_blocks_kept == {"a": (2, len(held[1]))}
    assert its.kv_cache_manager.get_block_ids("a")[1][: len(held[1])] == held[1]


@pytest.fixture
def hasher():
    """Return what vLLM names the blocks of a prompt by, for prefix caching."""
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def test_a_session_that_waits_for_its_next_piece_keeps_no_room_for_drafts():
    its = scheduler(8)
    add(its, "a", [5] * 20, resumable=True)
    output = its.schedule()
    assert num_held(its, "a") == 4
    its.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[STOP]]))
    add(its, "b", [6] * 90)
    output = its.schedule()
    assert output.num_scheduled_tokens == {"b": 90}
    assert output.triforce_blocks_kept == {"a": (2,)}


def test_a_session_waits_for_no_room_for_drafts():
    its = scheduler(10)
    add(its, "a", [5] * 20, resumable=True)
    step(its, token=STOP)
    add(its, "b", [6] * 20)
    step(its)
    assert num_held(its, "a") == num_held(its, "b") == 4
    add(its, "a", [5] * 90, resumable=True)  # seven blocks in all
    assert step(its).num_scheduled_tokens["a"] == 90


def reading(num_tokens: int = 64, num_running: int = 3, num_blocks: int = 60, **params):
    """Make a scheduler of such steps with requests that have drafts, and with a late prompt."""
    its = scheduler(num_blocks, max_num_batched_tokens=num_tokens)
    for name in "abcd"[:num_running]:
        add(its, name, [5] * 10, **params)
    step(its)
    return its


def test_a_seeded_request_does_not_share():
    """How much it proposes must not depend on how many others do."""
    its = scheduler(60, max_num_batched_tokens=64)
    for name in "abc":
        add(its, name, [5] * 10)
    add(its, "seeded", [5] * 10, temperature=1.0, seed=3)
    step(its)
    planned = step(its).triforce_plan.proposing
    assert [planned[name].num_tokens for name in ("seeded", *"abc")] == [32, 10, 9, 9]


@pytest.mark.parametrize("num_tokens, scheduled", [(64, 16), (128, 32)])
def test_prompts_are_read_in_the_chunks_that_vllm_reads(num_tokens, scheduled):
    its = reading(num_tokens, num_running=1)
    its.scheduler_config.long_prefill_token_threshold = scheduled
    add(its, "late", [6] * 100)
    output = step(its)
    # vLLM cuts drafts by this limit as well.
    assert output.num_scheduled_tokens == {"a": scheduled, "late": scheduled}


@pytest.mark.parametrize("reason", ["blocks", "places", "paused", "grammar"])
def test_prompts_that_cannot_be_admitted_take_nothing(reason):
    its = reading(128, num_blocks=20 if reason == "blocks" else 60)
    params = {}
    if reason == "places":
        its.max_num_active_reqs = 3
    elif reason == "paused":
        its.set_pause_state(PauseState.PAUSED_NEW)
    elif reason == "grammar":
        params["structured_outputs"] = StructuredOutputsParams(regex="a")
    add(its, "late", [6] * 300, **params)
    if reason == "grammar":
        its.requests["late"].structured_output_request.grammar = Future()
    for _ in range(2):
        output = step(its)
        assert "late" not in output.num_scheduled_tokens
        assert all(output.scheduled_spec_decode_tokens[name] for name in "abc")


def test_drafts_of_a_seeded_request_are_cut_for_no_prompt():
    """What it samples depends on its drafts, and must not on what arrives."""
    its = reading(64, num_running=1, temperature=1.0, seed=3)
    add(its, "late", [6] * 100)
    for read in (31, 31, 31, 7):
        assert step(its).num_scheduled_tokens == {"a": 33, "late": read}


def test_a_prompt_that_waits_for_blocks_is_looked_up_once_a_step(monkeypatch, hasher):
    """It is cached, but for its end, and the lookup takes long."""
    its = scheduler(20, prefix_caching=True)
    its.kv_cache_manager.enable_kv_cache_events = True
    add(its, "first", [5] * 161, hasher=hasher)
    step(its, token=STOP)
    add(its, "a", [6] * 100, hasher=hasher)
    step(its)
    looks, told = [], []
    coordinator = its.kv_cache_manager.coordinator
    find = coordinator.find_longest_cache_hit
    monkeypatch.setattr(
        coordinator, "find_longest_cache_hit", lambda *args: looks.append(1) or find(*args)
    )
    monkeypatch.setattr(coordinator, "emit_cached_block_events", lambda *_: told.append(1))
    add(its, "late", [5] * 260, hasher=hasher, extra_args={"kv_cache_report_mode": "full"})
    for _ in range(10):
        assert "late" not in step(its).num_scheduled_tokens
    assert len(looks) <= 11 and len(told) == 10


def test_a_prompt_that_fits_by_its_cached_prefix_waits_for_no_drafts(hasher):
    """vLLM looks it up only in a step that has a token left for it."""
    its = scheduler(20, prefix_caching=True, max_num_batched_tokens=64)
    add(its, "a", [5] * 161, hasher=hasher)
    for _ in range(8):
        step(its)
    add(its, "b", [6] * 10, hasher=hasher)
    step(its)
    step(its)
    add(its, "late", [5] * 170, hasher=hasher)  # eleven blocks, ten of which a has
    read = [step(its).num_scheduled_tokens.get("late", 0) for _ in range(3)]
    assert read[0] or read[1], read


def test_drafts_behind_the_end_of_a_turn_are_dropped():
    """Else they would be verified behind the next piece, to which they do not belong. A scheduler
    for Runner V2 has a plan without them."""
    its = scheduler(20, max_num_batched_tokens=32, scheduler_cls=TriForceScheduler)
    add(its, "a", [5] * 20, resumable=True)
    output = its.schedule()
    its.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[STOP]]))
    its.update_draft_token_ids(DraftTokenIds(["a"], [[DRAFT] * 4]))
    assert its.requests["a"].spec_token_ids
    add(its, "a", [5] * 50, resumable=True)
    outputs = [its.schedule() for _ in range(2)]
    assert [output.num_scheduled_tokens["a"] for output in outputs] == [32, 18]
    assert not any(output.scheduled_spec_decode_tokens for output in outputs)


def test_runner_v1_proposes_nothing_that_would_be_cut():
    """But for a seeded request, which must not depend on arrivals."""
    for params, expected in (({}, 0), ({"temperature": 1.0, "seed": 3}, 32)):
        its = scheduler(40, max_num_batched_tokens=64, scheduler_cls=TriForceScheduler)
        add(its, "a", [5] * 20, **params)
        output = its.schedule()
        assert output.num_spec_tokens_to_schedule == 32
        its.update_from_output(
            output, ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[TOKEN]])
        )
        add(its, "late", [6] * 200)
        assert its.schedule().num_spec_tokens_to_schedule == expected
