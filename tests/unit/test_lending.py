"""Promise: blocks that are lent to drafts are back before somebody waits for them, and whether a
drafted token is verified does not depend on those behind it."""

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tests.simulation.engine import make_scheduler

TOKEN, STOP, DRAFT = 7, 3, 8
BLOCK = 16


def scheduler(num_blocks: int, num_drafts: int = 32, **settings):
    """Make a scheduler with so many blocks beside the null block, whose requests all draft."""
    return make_scheduler(
        True,
        is_asynchronous=False,
        num_blocks=num_blocks + 1,
        block_size=BLOCK,
        max_num_seqs=8,
        max_model_len=1024,
        adaptive=False,
        min_context=0,
        num_speculative_tokens=num_drafts,
        **settings,
    )


def add(its, name: str, prompt: list[int], resumable=False, hasher=None, **params) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=[STOP], **params)
    its.add_request(
        Request(name, list(prompt), params, None, resumable=resumable, block_hasher=hasher)
    )


def step(its, token: int = TOKEN, num_drafts: int = 32):
    """Run a step that gives each request a token; all drafts are wrong."""
    output = its.schedule()
    names = list(output.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    its.update_from_output(
        output, ModelRunnerOutput(names, places, sampled_token_ids=[[token] for _ in names])
    )
    planned = output.triforce_plan.proposing
    drafts = [
        [DRAFT] * min(num_drafts, planned[n].num_tokens if n in planned else 0) for n in names
    ]
    its.update_draft_token_ids(DraftTokenIds(names, drafts))
    return output


def num_held(its, name: str) -> int:
    return len(its.kv_cache_manager.get_block_ids(name)[0])


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


def test_a_cached_prompt_waits_for_no_room_for_drafts():
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    its = scheduler(13, prefix_caching=True)
    add(its, "a", [5] * 161, hasher=hasher)
    step(its)
    assert num_held(its, "a") == 13
    add(its, "b", [5] * 160 + [6] * 4, hasher=hasher)
    assert step(its).num_scheduled_tokens["b"] == 4


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
