"""Promise: bad input gets an error that names the value, the reason and the remedy."""

import dataclasses

import pytest

from tests.refusals import refused
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.budget import RetrievalBudget


def test_given_values_are_fixed_and_open_ones_chosen():
    """Without the controller open values are the paper's."""
    open_ = TriForceConfig().with_defaults(can_adapt=True)
    assert open_.adaptive_keys == ("context", "gamma", "length")
    assert (open_.num_speculative_tokens, open_.gamma) == (32, 4)
    assert open_.resolve(32).min_context == 0
    given = TriForceConfig(num_speculative_tokens=5, gamma=1, min_context=7).with_defaults(
        can_adapt=True
    )
    assert given.adaptive_keys == ()
    assert (given.num_speculative_tokens, given.gamma, given.min_context) == (5, 1, 7)
    for off in (
        TriForceConfig(adaptive=False).with_defaults(can_adapt=True),
        TriForceConfig().with_defaults(can_adapt=False),
    ):
        assert off.adaptive_keys == ()
        assert (off.num_speculative_tokens, off.gamma) == (6, 2)
        assert off.resolve(32).min_context == 8192
    assert TriForceConfig(levels="1,3").with_defaults(can_adapt=True).adaptive_keys == (
        "context",
        "length",
    )


def test_where_shapes_are_fixed_gamma_is_not_chosen():
    """On Model Runner V2 every place of a proposal costs memory."""
    filled = TriForceConfig().with_defaults(can_adapt=True, model="draft", has_fixed_shapes=True)
    assert (filled.gamma, filled.num_speculative_tokens) == (2, 12)
    assert filled.adaptive_keys == ("context", "gamma", "length")
    assert filled.resolve(16).sources == ("draft_model", "prompt_lookup")
    alone = TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True)
    assert alone.gamma == 4, "drafts that cost nothing"
    head = TriForceConfig().with_defaults(True, "head", has_fixed_shapes=True, is_head=True)
    assert head.gamma == 3
    off = TriForceConfig(adaptive=False).with_defaults(can_adapt=True, has_fixed_shapes=True)
    assert off.gamma == 2
    given = TriForceConfig(gamma=3, num_speculative_tokens=5)
    filled = given.with_defaults(can_adapt=True, has_fixed_shapes=True)
    assert (filled.gamma, filled.num_speculative_tokens) == (3, 5)


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"gama": 2}, ["'gama'", "did you mean 'gamma'"]),
        ({"zzz": 1}, ["'zzz'", "known keys"]),
        ({"retrieval_chunk_size": 32}, ["'retrieval_chunk_size'", "is gone", "--block-size"]),
        ({"gamma": 0}, ["gamma=0", "at least 1"]),
        ({"gamma": True}, ["gamma=True", "bool"]),
        ({"num_speculative_tokens": 129}, ["num_speculative_tokens=129", "at most 128"]),
        ({"num_speculative_tokens": "6"}, ["'6'", "int", "str"]),
        ({"retrieval_budget": -32}, ["retrieval_budget=-32", "at least 1"]),
        ({"refresh_interval": 8}, ["'refresh_interval' is gone", "Leave it out"]),
        ({"min_context": -1}, ["min_context=-1", "at least 0"]),
        ({"num_sink_tokens": 0}, ["num_sink_tokens=0"]),
        ({"prompt_lookup_max": 0}, ["prompt_lookup_max=0"]),
        ({"max_slowdown": 1.5}, ["max_slowdown=1.5", "at most 1"]),
        ({"log_interval": -1}, ["log_interval=-1"]),
        ({"log_interval": float("nan")}, ["log_interval=nan"]),
        ({"log_interval": float("inf")}, ["log_interval=inf"]),
        ({"levels": "1,2"}, ["'1,2'", "1,3"]),
        ({"adaptive": 1}, ["adaptive=1", "bool", "int"]),
        ({"draft_sources": "ngram"}, ["'ngram'", "not a source of drafts", "'prompt_lookup'"]),
        ({"draft_sources": ""}, ["draft_sources=''", "'draft_model'"]),
        ({"draft_sources": "prompt_lookup, prompt_lookup"}, ["twice"]),
        ({"adaptive_keys": ["length"]}, ["'adaptive_keys'", "unknown to TriForce"]),
        ({"selection": "h2o"}, ["'h2o'", "'retrieval' or 'streaming'"]),
        (
            {"retrieval_budget": 256, "retrieval_recent_tokens": 256},
            ["retrieval_recent_tokens=256", "retrieval_budget=256"],
        ),
    ],
)
def test_bad_keys(keys, named):
    with refused(*named):
        TriForceConfig.from_speculative_config(keys)


def sources(
    model: str | None = None, can_adapt: bool = True, is_head: bool = False, **keys
) -> tuple[str, ...]:
    config = TriForceConfig(**keys).with_defaults(can_adapt, model, is_head=is_head)
    return config.resolve(32).sources


def test_default_sources_follow_the_model_and_the_controller():
    assert sources() == ("prompt_lookup",)
    assert sources("draft") == ("draft_model", "prompt_lookup")
    assert sources("draft", can_adapt=False) == sources("draft", gamma=2) == ("draft_model",)
    assert sources("draft", levels="1,3") == ("draft_model", "prompt_lookup")
    assert sources("draft", levels="1,3", adaptive=False) == ("draft_model",)
    assert sources("draft", draft_sources="draft_model") == ("draft_model",)
    both = "prompt_lookup, draft_model"
    assert sources("draft", draft_sources=both) == ("prompt_lookup", "draft_model")
    assert sources("head", is_head=True) == ("head", "prompt_lookup")
    assert sources("head", is_head=True, gamma=2) == ("head",)


OF_DRAFTS = {"model": "some/draft", "gamma": 2, "draft_sources": "draft_model"}
OF_DRAFTS |= {"prompt_lookup_max": 4, "num_sink_tokens": 4}
OF_PROPOSALS = {"num_speculative_tokens": 4, "min_context": 100, "max_slowdown": 0.5}


@pytest.mark.parametrize(
    "levels, key, value",
    [
        *(("2,3", *unused) for unused in OF_DRAFTS.items()),
        *(("3", *unused) for unused in (OF_DRAFTS | OF_PROPOSALS).items()),
    ],
)
def test_keys_of_levels_that_take_no_part_are_refused(levels, key, value):
    """Else a draft would be loaded and never used. Plain decoding uses none of them."""
    keys = {"levels": levels, "kv_offload_gib": 8 if levels == "3" else None, key: value}
    model = keys.pop("model", None)
    part = ": level 1 takes no part. Leave one" if levels == "2,3" else ""
    with pytest.raises(
        ValueError, match=f"{key}={value!r} is not supported with levels='{levels}'{part}"
    ):
        TriForceConfig(**keys).with_defaults(can_adapt=True, model=model)


def test_a_heads_window_has_no_sinks():
    for is_head, num_sinks in ((False, 16), (True, 0)):
        config = TriForceConfig().with_defaults(True, "draft", is_head=is_head)
        resolved = config.resolve(32)
        assert resolved.num_sink_tokens == num_sinks
        assert resolved.window_tokens == config.window_tokens == num_sinks + 240 + 120


@pytest.mark.parametrize(
    "model, keys, named",
    [
        (None, {"draft_sources": "draft_model"}, ["needs a draft model", "'model'"]),
        ("d", {"draft_sources": "prompt_lookup"}, ["'d'", "draft_model", "leave 'model' out"]),
        (
            "d",
            {"draft_sources": "draft_model,prompt_lookup", "gamma": 2},
            ["nothing chooses", "gamma", "'draft_model'"],
        ),
        ("d", {"gamma": 2, "prompt_lookup_max": 4}, ["prompt_lookup_max=4", "draft_model"]),
        ("d", {"draft_sources": "head"}, ["'d' is no head", "'draft_model'"]),
        ("h", {"draft_sources": "draft_model", "is_head": True}, ["'h' is a head", "Use 'head'"]),
        ("h", {"num_sink_tokens": 4, "is_head": True}, ["num_sink_tokens=4", "'h'"]),
    ],
)
def test_sources_that_do_not_fit(model, keys, named):
    with refused(*named):
        sources(model, **keys)


def test_recent_tokens_that_do_not_fit_the_block():
    with refused("retrieval_recent_tokens=100", "KV block (32 tokens)", "use 128"):
        TriForceConfig(retrieval_recent_tokens=100).resolve(32)


@pytest.mark.parametrize(
    "keys, block_size, budget, recent",
    [
        ({"retrieval_budget": 256}, 128, 384, 128),  # the CPU's default block
        ({"retrieval_budget": 1000}, 128, 1024, 128),
        ({"retrieval_budget": 1}, 32, 96, 32),
        ({"retrieval_budget": 512, "retrieval_recent_tokens": 384}, 128, 640, 384),
        ({}, 2048, 6144, 2048),
        ({"retrieval_budget": 256}, 64, 256, 64),  # fits
    ],
)
def test_a_budget_is_rounded_up_to_whole_blocks(keys, block_size, budget, recent):
    config = TriForceConfig(**keys).resolve(block_size)
    assert (config.retrieval_budget, config.retrieval_recent_tokens) == (budget, recent)
    assert config.min_context == 2 * budget
    blocks = budget // block_size
    assert config.budget == RetrievalBudget(blocks, blocks, recent // block_size)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_by_default_the_budget_is_a_share_of_the_context(block_size):
    config = TriForceConfig().resolve(block_size)
    assert config.block_size == block_size
    contexts = [100, 512, 4096, 4096 + 8 * block_size, 16384, 32768, 100_000]
    budgets = [512, 512, 512, 512 + block_size, 2048, 4096, 4096]
    assert [config.budget_of(context) for context in contexts] == budgets
    assert config.retrieval_recent_tokens == 128
    assert config.min_context == 2 * config.retrieval_budget == 8192
    assert config.table_width * block_size > 4096


@pytest.mark.parametrize(
    "keys, reason",
    [({"adaptive": False}, "without the controller"), ({"min_context": 0}, "with min_context")],
)
def test_a_limit_of_losses_needs_the_controller(keys, reason):
    given = TriForceConfig(max_slowdown=0.1)
    assert given.with_defaults(can_adapt=True).max_slowdown == 0.1
    assert TriForceConfig().with_defaults(can_adapt=True).max_slowdown == 0.05
    assert TriForceConfig(**keys).with_defaults(can_adapt=True).max_slowdown == 1
    with pytest.raises(ValueError, match=f"max_slowdown=0.1 is not supported {reason}"):
        dataclasses.replace(given, **keys).with_defaults(can_adapt=True)
