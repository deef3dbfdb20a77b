"""Promise: what Model Runner V2 does in its own way keeps what both runners promise.

That promise itself is tests/parity's. Triton's interpreter must be in place before vLLM is
imported, so the cases run in a process of their own (``cases.py``), which reports JSON.
"""

import json

import pytest
import torch

from tests.child import results_of
from tests.generation import generate
from tests.head_oracle import LAYERS, STEPS, VOCAB, expected_logits
from tests.models import PAIR, held_out_tokens, make_head, make_llama
from tests.parity.checks import LEAST_P_VALUE, p_values
from tests.v2.cases import NUM_TOKENS
from tests.v2.environment import needs_interpreter, v2_environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_interpreter]


@pytest.fixture(scope="module")
def asked(pair, tmp_path_factory) -> dict:
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    folder = tmp_path_factory.mktemp("v2")
    text = held_out_tokens(700)
    shape = dict(num_kv_heads=2, std=0.25, query_scale=1.5)
    draw, lengths = torch.Generator().manual_seed(3), (400, 300, 350, 390)
    return {
        **pair,
        "mixed": [text[:520], text[:90], text[:400]],
        "third": [text[:400], text[100:370], text[300:618]],
        "head": make_head(folder / "head", pair["target"], draft_vocab=VOCAB // 2, layers=LAYERS),
        "eight": make_llama(folder / "target", vocab_size=8, **shape),
        "draft of eight": make_llama(folder / "draft", vocab_size=8, num_layers=1, std=0.1, seed=1),
        "prompts of eight": [torch.randint(8, (n,), generator=draw).tolist() for n in lengths],
    }


@pytest.fixture(scope="module")
def found(asked) -> dict:
    return results_of("tests.v2.cases", env=v2_environment(), input=json.dumps(asked))


def test_padding_changes_no_greedy_token(engines, pair, asked, found):
    """The full pass verifies six tokens of every request, proposed or not."""
    wanted = generate(engines.get(pair["target"]), asked["mixed"], max_tokens=NUM_TOKENS)
    assert found["draft"]["informed"] == wanted
    assert found["draft"]["padded"] == wanted


def test_padding_changes_no_distribution(asked, found):
    sampled = found["sampled"]
    answered = list(zip(asked["prompts of eight"], sampled["params"], sampled["tokens"]))
    assert min(p_values(asked["eight"], answered)) > LEAST_P_VALUE
    assert 0.2 < sampled["level2_acceptance_rate"] < 0.8


def test_draft_has_no_part_in_vllms_kv_cache(found):
    assert found["draft"]["num_draft_layers"] > 0
    assert found["draft"]["draft_layers_in_kv_cache"] == 0


def test_invented_drafts_of_a_new_request_are_no_tokens(found):
    """The distributions at hand are of whoever had its state before, so this runner's vLLM must
    reject such drafts without a look at them, as it does with -1."""
    assert found["invented"] and set(found["invented"]) == {-1}


def test_what_a_grammar_may_cut_is_handed_up_as_certain(found):
    """The scheduler cuts a proposal at its first token that the grammar forbids: where it ends
    depends on what was drawn, and only a certain token is tested rightly then."""
    certain, free = found["grammar"]["probs"]  # the third is greedy
    assert len(certain) > 3 and all(p == 1 for p in certain)
    assert any(p < 0.999 for p in free), "level 2's own distribution"
    for row in (0, 2):
        assert set(found["grammar"]["texts"][row]) <= set(" abcdefghijklm")


def test_a_heads_logits_are_those_of_the_training_script(asked, found):
    """Of the first draft after a prompt: by the target's states, then by the head's own. The head
    drafts half of the vocabulary, tokens 1, 3, 5, ..."""
    drafted = torch.tensor(found["head"]["logits"])
    assert len(drafted) == STEPS
    drafts = drafted.argmax(-1)[:-1].tolist()
    wanted = expected_logits(asked["head"], asked["target"], found["head"]["context"], drafts)
    for logits, expected in zip(drafted, wanted, strict=True):
        assert (logits[1::2] - expected).abs().max() < 1e-3 * expected.abs().max()


def test_what_is_kept_is_what_is_reserved(found):
    """On a GPU, before the KV cache is sized."""
    assert found["memory"]["kept"] == found["memory"]["reserved"]


def test_what_passes_take_is_told(found):
    """Where lengths are given nothing is measured at start-up; asked to, the worker measures."""
    assert found["measured"]["at start"] is None
    measured = found["measured"]["anew"]
    # Differences of two times, of one run each in the interpreter: 0 where the first was longer.
    assert measured["draft"] >= 0 and [tokens for tokens, _ in measured["level2_by_tokens"]] == [1]
    for tokens, points in measured["full_by_tokens"]:
        assert tokens in (1, 5), "EIGHT proposes four"
        assert [context for context, _ in points] == sorted(context for context, _ in points)
        assert all(seconds > 0 for _, seconds in points)
    assert [rows for rows, _ in measured["full_by_rows"]] == [1, 2, 4]
    assert [rows for rows, _, _ in measured["full_by_num_reqs"]] == [2, 4]


def test_measuring_is_not_counted(found):
    """Counters that fell would end a front end whose Prometheus metrics have them."""
    before, after = found["measured"]["counts"]
    assert before == after and before[0]["num_proposals"] > 0
    assert before[1]["num_level2_passes"] > 0 and before[1]["time_seconds"]


def test_an_fp8_kv_cache_in_host_memory_is_what_it_is_on_the_device(found):
    """To the token, and level 2 accepts and is accepted as often."""
    if "quantized" not in found:
        pytest.skip("vLLM's CPU build has fp8 KV caches with AVX-512 only")
    device, host = (found["quantized"][where] for where in ("device", "host"))
    assert host["tokens"] == device["tokens"]
    counted = host["counters"]
    assert counted["num_level2_accepted"] > 0 and counted["num_staged_bytes"] > 0
    same = {name for name, n in counted.items() if device["counters"][name] == n}
    of_offload = {"num_staged_bytes", "num_pool_blocks", "num_pool_hits", "num_pool_bytes"}
    assert counted.keys() - same <= of_offload | {"time_seconds"}


def test_without_kv_in_host_memory_nothing_of_it_is_imported(found):
    modules = set(found["modules"])
    assert "vllm_triforce.runner_v2.build" in modules
    parts = ("offload.", "kernels.offload")
    its = tuple(f"vllm_triforce.{part}" for part in parts)
    assert not [name for name in modules if name.startswith(its)]
