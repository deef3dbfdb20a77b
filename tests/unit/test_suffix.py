"""Promise: suffix decoding drafts what followed before, tenants apart, in bounded memory."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.draft_sources import SOURCES
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.sampling import SamplingRows


@pytest.fixture
def build():
    """Return the source's class."""
    pytest.importorskip("arctic_inference")
    return SOURCES["suffix"]


def batch_of(**requests: list[int]) -> DraftBatch:
    """Make a batch; a request's tenant is what its id has before a dash, none for ``seeded``."""
    count = len(requests)
    tenants = [name.partition("_")[0] for name in requests]
    return DraftBatch(
        request_ids=list(requests),
        token_ids=[np.array(tokens, dtype=np.int32) for tokens in requests.values()],
        num_computed_tokens=[len(tokens) - 1 for tokens in requests.values()],
        max_num_tokens=[32] * count,
        block_tables=[],
        sampling=SamplingRows(torch.zeros(count)),
        tenants=[None if tenant == "seeded" else tenant for tenant in tenants],
    )


def drafts(source, count: int = 6, proposed: list[int] | None = None, **requests) -> list:
    batch, proposal = batch_of(**requests), Proposal.empty(len(requests))
    for row in range(len(batch)):
        proposal.token_ids[row] = list(proposed or [])
    rows = list(range(len(batch)))
    matches = source.find_matches(batch, proposal, rows)
    counts = [count] * len(rows)
    return source.draft(batch, proposal, rows, counts, matches, None, None).token_ids


def answer(source, tokens: list[int], name: str = "a_earlier") -> None:
    """Let a request end with an answer."""
    drafts(source, **{name: [90, 91]})
    source.add_answer(name, tokens)
    source.release(name)


@pytest.mark.parametrize(
    "tokens, drafted",
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9, 1]),
        ([1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),  # loops go on
        ([4, 4, 4], [4, 4, 4, 4, 4, 4]),
        ([1, 5, 1, 6, 1, 5, 7, 1], [5]),  # what followed most often
        ([8, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2, 6, 8, 1, 2], [5, 9, 1, 2, 6, 7]),  # the longest match
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_a_request_continues_as_it_did_before(build, tokens, drafted):
    [found] = drafts(build(), a=tokens)
    assert found[: len(drafted)] == drafted[: len(found)] and bool(found) == bool(drafted)


def occurs(part: list[int], texts: list[list[int]]) -> bool:
    width = len(part)
    return any(part == text[i : i + width] for text in texts for i in range(len(text) - width + 1))


def test_every_draft_followed_the_newest_token_somewhere(build):
    """In the request itself or in an answer of its tenant."""
    draw, source = random.Random(5), build()
    answers, num_drafted = [], 0
    for number in range(40):
        name = f"a_{number}"
        tokens = [draw.randrange(7) for _ in range(draw.randrange(2, 40))]
        output: list[int] = []
        while len(output) < 30:
            [found] = drafts(source, draw.randrange(1, 30), **{name: tokens + output})
            newest = (tokens + output)[-1:]
            assert not found or occurs(newest + found, [tokens + output, *answers])
            num_drafted += len(found)
            # Some of it is accepted, and a token of the target follows.
            output += [*found[: draw.randrange(4)], draw.randrange(7)]
        source.add_answer(name, output)
        source.release(name)
        answers.append(output)
    assert num_drafted > 1000 and source.num_requests == 0


def test_a_draft_follows_the_proposal(build):
    """Levels 1 and 2 draft on from tokens that no tree has."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 3]
    assert drafts(build(), 3, proposed=[5], a=tokens) == [[6, 7]]
    source = build()
    drafts(source, 3, proposed=[5], a=tokens)
    assert drafts(source, 1, a=tokens) == [[4]]  # and no tree has them afterwards


def test_finished_answers_are_seen_by_their_tenant_alone(build):
    source = build()
    answer(source, [5, 6, 7, 8])
    answer(source, [5, 1, 2], "seeded_earlier")
    answer(source, [5, 3, 4], "_earlier")  # without a salt
    prompts = {name: [40, 5] for name in ("a_now", "b_now", "seeded_now", "_now")}
    assert drafts(source, 3, **prompts) == [[6, 7], [], [], [3, 4]]
    assert drafts(source, 3, a_now=[40, 5, 41, 90]) == [[]]  # a prompt left with its request


def test_a_session_goes_on_without_its_newest_token(build):
    source = build()
    drafts(source, a=[1, 2, 3, 1, 2])
    assert drafts(source, 2, a=[1, 2, 3, 1]) == [[2, 3]]
    assert drafts(source, 1, a=[1, 2, 3, 1, 4, 5, 1, 4, 6, 1]) == [[4]]
    source.release("a")
    assert source.num_requests == 0


def test_the_oldest_answers_leave(build, monkeypatch):
    monkeypatch.setattr(sys.modules[build.__module__], "_MAX_ANSWER_TOKENS", 100)
    source = build()
    for number in range(30):
        answer(source, list(range(100 * number, 100 * number + 10)), f"a{number // 25}_earlier")
    assert sum(count for _, _, count in source._by_age) == 100
    assert drafts(source, 2, a0_now=[40, 2000], a1_now=[40, 2500]) == [[2001, 2002], [2501, 2502]]
    assert drafts(source, 2, a0_now=[40, 1900], a1_now=[40, 2400]) == [[], []]
    for number in range(10):
        answer(source, list(range(100 * number, 100 * number + 10)), "b_earlier")
    assert set(source._answers) == {"b"}  # a tenant without answers leaves nothing


def test_confidence_follows_match_and_probability(build):
    source, proposal = build(), Proposal.empty(1)

    def classes(*tokens: int) -> tuple[int, ...]:
        source.release("a")
        [match] = source.find_matches(batch_of(a=list(tokens)), proposal, [0])
        assert len(match.match_class) == len(match.token_ids)
        return match.match_class

    first = tuple(range(20))
    assert classes(*first, 30, 3) == (2, 3)  # two tokens for each of the match
    assert classes(*first, 30, 3, 4) == (3, 4, 5, 6)
    assert set(classes(*first, 30, *first[:12])) == {9}  # a class for all long matches
    assert classes(1, 2, 1, 3, 1) == (1, 3)  # of two continuations one
    assert classes(1, 2, 1, 3, 1, 4, 1, 5, 1) == (0, 3)
    assert classes(1, 2, 3, 4, 1, 2, 3, 5, 7, 1) == (2, 3)


@pytest.mark.parametrize("draft_sources", ["suffix", "suffix,prompt_lookup"])
def test_without_the_library_it_is_refused(monkeypatch, draft_sources):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.delitem(sys.modules, "vllm_triforce.runner_v1.sources.suffix", raising=False)
    monkeypatch.setattr(SOURCES, "_loaded", {})
    config = TriForceConfig(draft_sources=draft_sources)
    named = f"draft_sources='{draft_sources}' is not supported here.*pip install arctic-inference,"
    with pytest.raises(ValueError, match=named):
        config.with_defaults(can_adapt=True)


def test_model_runner_v2_refuses_it():
    from vllm_triforce.config.checks import _check_runner

    engine = SimpleNamespace(use_v2_model_runner=True)
    config = SimpleNamespace(sources=("suffix",), draft_sources="suffix")
    named = "draft_sources='suffix' is not supported with Model Runner V2.*'prompt_lookup'"
    with pytest.raises(ValueError, match=named):
        _check_runner(engine, config)
