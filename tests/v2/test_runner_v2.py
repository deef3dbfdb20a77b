"""Promise: what Model Runner V2 does in its own way keeps what both runners promise.

That promise itself is tests/parity's.
"""

import dataclasses
import sys

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import triforce
from tests.generation import generate
from tests.head_oracle import LAYERS, STEPS, VOCAB, expected_logits
from tests.inside import built, scheduler_of, worker_of
from tests.models import held_out_tokens, make_head, make_llama
from tests.outputs import run
from tests.parity.cases import DRAFT, EIGHT, SMALL
from tests.parity.checks import LEAST_P_VALUE, p_values
from tests.parity.disturbing import replaced
from tests.v2.engine import speculator_of, uninformed_scheduler

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def text() -> list[int]:
    return held_out_tokens(700)


@pytest.fixture
def llm(engines, pair):
    return engines.get(pair["target"], triforce(**DRAFT, model=pair["draft"]), **SMALL)


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> dict:
    """Return a target and a draft of eight tokens, and prompts for them."""
    folder = tmp_path_factory.mktemp("eight")
    shape = dict(num_kv_heads=2, std=0.25, query_scale=1.5)
    draw, lengths = torch.Generator().manual_seed(3), (400, 300, 350, 390)
    return {
        "target": make_llama(folder / "target", vocab_size=8, **shape),
        "draft": make_llama(folder / "draft", vocab_size=8, num_layers=1, std=0.1, seed=1),
        "prompts": [torch.randint(8, (n,), generator=draw).tolist() for n in lengths],
    }


@pytest.fixture
def of_eight(engines, eight):
    return engines.get(eight["target"], triforce(**EIGHT, model=eight["draft"]), **SMALL)


def outputs(llm, prompts, params: list[dict]) -> list:
    common = dict(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    rows = [SamplingParams(**{**common, **own}) for own in params]
    return run(llm, prompts, rows)


def test_without_kv_in_host_memory_nothing_of_it_is_imported(llm):
    assert "vllm_triforce.runner_v2.build" in sys.modules
    its = ("vllm_triforce.offload.", "vllm_triforce.kernels.offload")
    assert not [name for name in sys.modules if name.startswith(its)]


def test_draft_has_no_part_in_vllms_kv_cache(llm):
    names = speculator_of(llm).draft_layers
    groups = worker_of(llm).model_runner.kv_cache_config.kv_cache_groups
    assert names and not [name for group in groups for name in names if name in group.layer_names]


def test_what_is_kept_is_what_is_reserved(llm):
    """On a GPU, before the KV cache is sized."""
    speculator, parts = speculator_of(llm), built(llm)
    selections, draft = parts.speculator.level2.selections, parts.speculator.sources["draft_model"]
    draft_layers = speculator.draft_layers.values()
    kv_bytes = sum(layer.kv_cache.nbytes for layer in speculator.target_layers.values())
    summaries = sum(summaries.num_bytes for summaries in selections.summaries.values())
    kept = {
        "proposals' distributions": parts.speculator.draft_logits.logits.nbytes,
        "selections": selections.tables.nbytes,
        "votes": selections.in_pass.num_bytes,
        "the draft's windows": sum(layer.kv_cache.nbytes for layer in draft_layers),
        "the draft's distributions": draft._logits.nbytes,
        "the head's states": 0 if parts.hidden_states is None else parts.hidden_states.ring.nbytes,
    }
    assert worker_of(llm).extra_memory() == (kept, summaries / kv_bytes)


def test_what_a_grammar_may_cut_is_handed_up_as_certain(llm, text):
    """The scheduler cuts a proposal at its first token that the grammar forbids: where it ends
    depends on what was drawn, and only a certain token is tested rightly then."""
    grammar = dict(structured_outputs=StructuredOutputsParams(regex="[ a-m]{6,}"))
    params = [dict(temperature=1.0) | grammar, dict(temperature=1.0), grammar]
    states = worker_of(llm).model_runner.sampler.sampling_states
    speculator = built(llm).speculator
    handed_up: dict[int, list[float]] = {}

    def propose(input_batch, *args, **kwargs):
        tokens = original(input_batch, *args, **kwargs)
        for row, name in enumerate(input_batch.req_ids):
            state = input_batch.idx_mapping_np[row]
            length = int(speculator.num_proposed[state])
            if length and states.temperature.np[state] > 0:
                table = speculator.draft_logits
                probs = table.logits[table.slot_of_state[state], :length].float().softmax(-1)
                own = probs.gather(1, tokens[row, :length, None])[:, 0].tolist()
                handed_up.setdefault(int(name.split("-")[0]), []).extend(own)
        return tokens

    with replaced(speculator_of(llm), "propose", propose) as original:
        found = outputs(llm, [text[:400], text[100:370], text[300:618]], params)
    certain, free = (handed_up[number] for number in sorted(handed_up))  # the third is greedy
    assert len(certain) > 3 and all(p == 1 for p in certain)
    assert any(p < 0.999 for p in free), "level 2's own distribution"
    for row in (0, 2):
        said = llm.get_tokenizer().decode(found[row].outputs[0].token_ids)
        assert set(said) <= set(" abcdefghijklm")


def test_invented_drafts_of_a_new_request_are_no_tokens(llm, text):
    """A request whose prompt is cached but for its last token takes the state of one that had a
    proposal, where the scheduler invents drafts, as one that is not ours does. The distributions at
    hand are the other's, so vLLM must reject such drafts without a look at them, as it does with
    -1."""
    prompt = text[:321]
    assert len(prompt) % 32 == 1
    sampler = worker_of(llm).model_runner.rejection_sampler.sampler
    # It ends inside a proposal, so that the last is never verified.
    outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=30, seed=0)])
    steps = []

    def apply(logits, expanded, states, states_np, positions, draft_sampled, *rest, **more):
        steps.append(draft_sampled[1:].tolist())
        return original(
            logits, expanded, states, states_np, positions, draft_sampled, *rest, **more
        )

    with (
        replaced(sampler, "apply_sampling_params", apply) as original,
        replaced(scheduler_of(llm), "dynamic_sd_lookup", None),
    ):
        outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=2, seed=1)])
    assert steps[0] and set(steps[0]) == {-1}


def test_padding_changes_no_distribution(of_eight, eight):
    """The full pass verifies four tokens of every request, proposed or not. Most requests pass
    min_context on the way: what comes before is all padding."""
    speculator, prompts = speculator_of(of_eight), eight["prompts"]
    params = [dict(temperature=t, max_tokens=36) for t in (1.0, 1.0, 0.6, 1.0)]
    limited = dataclasses.replace(speculator.config, min_context=400)
    with replaced(speculator, "config", limited), uninformed_scheduler(of_eight):
        found = outputs(of_eight, prompts, params)
    tokens = [list(output.outputs[0].token_ids) for output in found]
    answered = list(zip(prompts, params, tokens))
    assert min(p_values(eight["target"], answered)) > LEAST_P_VALUE
    assert 0.2 < speculator.counters.level2_acceptance_rate < 0.8


def counts(llm) -> list[dict]:
    """The counters as they are, and as they go to /metrics."""
    speculator = speculator_of(llm)
    return [dataclasses.asdict(speculator.counters), dataclasses.asdict(speculator.sent_counters)]


def test_what_passes_take_is_told(of_eight):
    """Where lengths are given nothing is measured at start-up; asked to, the worker measures, and
    does not count it: counters that fell would end a front end whose metrics have them."""
    assert of_eight.collective_rpc("triforce_measured") == [None]
    assert len(built(of_eight).slots), "requests that have left still have slots"
    before = counts(of_eight)
    (measured,) = of_eight.collective_rpc("triforce_measured", args=(True,))
    assert counts(of_eight) == before and before[0]["num_proposals"] > 0
    assert before[1]["num_level2_passes"] > 0 and before[1]["time_seconds"]
    assert [tokens for tokens, _ in measured["full_by_tokens"]] == [1, 5], "EIGHT proposes four"
    assert [rows for rows, _ in measured["full_by_rows"]] == [1, 2, 4]
    assert all(seconds > 0 for _, points in measured["full_by_tokens"] for _, seconds in points)


def test_a_heads_logits_are_those_of_the_training_script(engines, pair, text, tmp_path):
    """Of the first draft after a prompt: by the target's states, then by the head's own. The head
    drafts half of the vocabulary, tokens 1, 3, 5, ..."""
    head = make_head(tmp_path / "head", pair["target"], draft_vocab=VOCAB // 2, layers=LAYERS)
    keys = triforce(model=head, levels="1,3", gamma=STEPS, num_speculative_tokens=STEPS)
    llm = engines.get(pair["target"], keys, **SMALL)
    source, prompt, drafted = built(llm).speculator.sources["head"], text[:120], []

    def draw(sampling, hidden, step):
        drafted.append(source._model.compute_logits(hidden)[0].clone())
        return original(sampling, hidden, step)

    with replaced(source, "_draw", draw) as original:
        (answer,) = generate(llm, [prompt], max_tokens=STEPS + 1)
    found = torch.stack(drafted[:STEPS])
    drafts = found.argmax(-1)[:-1].tolist()
    wanted = expected_logits(head, pair["target"], prompt + answer[:1], drafts)
    for logits, expected in zip(found, wanted, strict=True):
        assert (logits[1::2] - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="vLLM's CPU build has fp8 KV caches with AVX-512 only",
)
def test_an_fp8_kv_cache_in_host_memory_is_what_it_is_on_the_device(engines, eight):
    """To the token, and level 2 accepts and is accepted as often."""
    found = []
    for offload in ({}, {"kv_offload_gib": 1.0}):
        keys = triforce(**EIGHT, model=eight["draft"], **offload)
        llm = engines.get(eight["target"], keys, **SMALL, kv_cache_dtype="fp8", dtype="bfloat16")
        tokens = generate(llm, eight["prompts"], max_tokens=NUM_TOKENS)
        found.append((tokens, dataclasses.asdict(speculator_of(llm).counters)))
    (wanted, on_device), (tokens, counted) = found
    assert tokens == wanted
    assert counted["num_level2_accepted"] > 0 and counted["num_staged_bytes"] > 0
    other = {name for name, n in counted.items() if on_device[name] != n}
    of_offload = {"num_staged_bytes", "num_pool_blocks", "num_pool_hits", "num_pool_bytes"}
    assert other <= of_offload | {"time_seconds"}
