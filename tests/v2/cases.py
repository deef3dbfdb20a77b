"""What Model Runner V2 does in its own way, judged by test_runner_v2.py.

``python -m tests.v2.cases`` in ``v2_environment()``, with the models and prompts on stdin, prints
what it saw as JSON.
"""

import dataclasses
import json
import sys

import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.child import say
from tests.conftest import triforce
from tests.generation import generate
from tests.head_oracle import STEPS
from tests.inside import built, scheduler_of, worker_of
from tests.parity.cases import DRAFT, EIGHT, SMALL
from tests.parity.disturbing import replaced
from tests.v2.engine import EnginesV2, speculator_of, uninformed_scheduler
from vllm_triforce.cache.summaries import MAX_SCORE_BYTES

NUM_TOKENS = 12
ENGINES = EnginesV2()


def run(asked: dict) -> dict:
    """
    Args:
        asked: models and prompts, by name.
    """
    results = _of_pair(asked) | _of_eight(asked) | {"head": _first_drafts(asked)}
    if torch.cpu._is_avx512_supported():  # without, vLLM's CPU build has no fp8 KV cache
        results["quantized"] = {where: _quantized(asked, where) for where in ("device", "host")}
    return results


def _of_pair(asked: dict) -> dict:
    llm = ENGINES.get(asked["target"], triforce(**DRAFT, model=asked["draft"]), **SMALL)
    return {
        "draft": _verified(llm, asked["mixed"]) | _draft_layers(llm),
        "memory": _memory(llm),
        "grammar": _grammar(llm, asked["third"]),
        "modules": sorted(name for name in sys.modules if name.startswith("vllm_triforce.")),
        "invented": _invented(llm, asked["third"][0][:321]),
    }


def _of_eight(asked: dict) -> dict:
    llm = ENGINES.get(asked["eight"], triforce(**EIGHT, model=asked["draft of eight"]), **SMALL)
    at_start = llm.collective_rpc("triforce_measured")[0]
    sampled = _sampled_beside_padding(llm, asked["prompts of eight"])
    assert len(built(llm).slots), "requests that have left still have slots"
    before = _counts(llm)
    anew = llm.collective_rpc("triforce_measured", args=(True,))[0]
    measured = {"at start": at_start, "anew": anew, "counts": [before, _counts(llm)]}
    return {"sampled": sampled, "measured": measured}


def _quantized(asked: dict, where: str) -> dict:
    """With an fp8 KV cache, on the device or in host memory."""
    keys = triforce(**EIGHT, model=asked["draft of eight"])
    if where == "host":
        keys |= {"kv_offload_gib": 1.0}
    llm = ENGINES.get(asked["eight"], keys, **SMALL, kv_cache_dtype="fp8", dtype="bfloat16")
    tokens = generate(llm, asked["prompts of eight"], max_tokens=NUM_TOKENS)
    return {"tokens": tokens, "counters": dataclasses.asdict(speculator_of(llm).counters)}


def _first_drafts(asked: dict) -> dict:
    """Return a context, and the logits of the head's first drafts after it."""
    keys = triforce(model=asked["head"], levels="1,3", gamma=STEPS, num_speculative_tokens=STEPS)
    llm = ENGINES.get(asked["target"], keys, **SMALL)
    source = built(llm).speculator.sources["head"]
    logits = []

    def draw(sampling, hidden, step):
        logits.append(source._model.compute_logits(hidden)[0].tolist())
        return original(sampling, hidden, step)

    prompt = asked["third"][0][:120]
    with replaced(source, "_draw", draw) as original:
        (answer,) = generate(llm, [prompt], max_tokens=STEPS + 1)
    return {"context": prompt + answer[:1], "logits": logits[:STEPS]}


def _verified(llm, prompts) -> dict:
    """What comes out where the scheduler knows the proposals, and where it has all verified."""
    generate(llm, prompts[:1], max_tokens=1)  # all prompts are cached from now on
    informed = generate(llm, prompts, max_tokens=NUM_TOKENS)
    with uninformed_scheduler(llm):
        padded = generate(llm, prompts, max_tokens=NUM_TOKENS)
    return {"informed": informed, "padded": padded}


def _memory(llm) -> dict:
    """Bytes that are reserved for what is kept, and that it takes."""
    speculator, parts = speculator_of(llm), built(llm)
    selections, draft = parts.speculator.level2.selections, parts.speculator.sources["draft_model"]
    draft_layers = speculator.draft_layers.values()
    kv_bytes = sum(layer.kv_cache.nbytes for layer in speculator.target_layers.values())
    summaries = sum(summaries.num_bytes for summaries in selections.summaries.values())
    in_pass = selections.in_pass
    votes = in_pass.num_bytes if hasattr(in_pass, "num_bytes") else MAX_SCORE_BYTES
    kept = {
        "proposals' distributions": parts.speculator.draft_logits.logits.nbytes,
        "selections": selections.tables.nbytes,
        "votes": votes,
        "the draft's windows": sum(layer.kv_cache.nbytes for layer in draft_layers),
        "the draft's distributions": draft._logits.nbytes,
        "the head's states": 0 if parts.hidden_states is None else parts.hidden_states.ring.nbytes,
    }
    return {"reserved": list(worker_of(llm).extra_memory()), "kept": [kept, summaries / kv_bytes]}


def _draft_layers(llm) -> dict:
    names = speculator_of(llm).draft_layers
    groups = worker_of(llm).model_runner.kv_cache_config.kv_cache_groups
    return {
        "num_draft_layers": len(names),
        "draft_layers_in_kv_cache": sum(
            name in group.layer_names for group in groups for name in names
        ),
    }


def _sampled_beside_padding(llm, prompts) -> dict:
    """Most requests pass min_context on the way: what comes before is all padding."""
    limited = dataclasses.replace(speculator_of(llm).config, min_context=400)
    speculator_of(llm).config = limited
    params = [dict(temperature=t, max_tokens=36) for t in (1.0, 1.0, 0.6, 1.0)]
    with uninformed_scheduler(llm):
        outputs = _outputs(llm, prompts, params)
    return {
        "params": params,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "level2_acceptance_rate": speculator_of(llm).counters.level2_acceptance_rate,
    }


def _counts(llm) -> list[dict]:
    """The counters as they are, and as they go to /metrics."""
    speculator = speculator_of(llm)
    return [dataclasses.asdict(speculator.counters), dataclasses.asdict(speculator.sent_counters)]


def _outputs(llm, prompts, params: list[dict]):
    common = dict(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    rows = [SamplingParams(**{**common, **own}) for own in params]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, rows, use_tqdm=False)


def _grammar(llm, prompts) -> dict:
    """What level 3's test is handed for sampled requests, of which the first has a grammar."""
    grammar = dict(structured_outputs=StructuredOutputsParams(regex="[ a-m]{6,}"))
    params = [dict(temperature=1.0) | grammar, dict(temperature=1.0), grammar]
    speculator = speculator_of(llm)
    runner = worker_of(llm).model_runner
    original = speculator.propose
    handed_up: dict[int, list[float]] = {}

    def propose(input_batch, *args, **kwargs):
        tokens = original(input_batch, *args, **kwargs)
        for row, name in enumerate(input_batch.req_ids):
            state = input_batch.idx_mapping_np[row]
            length = int(built(llm).speculator.num_proposed[state])
            if length and runner.sampler.sampling_states.temperature.np[state] > 0:
                table = built(llm).speculator.draft_logits
                probs = table.logits[table.slot_of_state[state], :length].float().softmax(-1)
                own = probs.gather(1, tokens[row, :length, None])[:, 0].tolist()
                handed_up.setdefault(int(name.split("-")[0]), []).extend(own)
        return tokens

    speculator.propose = propose
    try:
        found = _outputs(llm, prompts, params)
    finally:
        del speculator.propose
    decode = llm.get_tokenizer().decode
    return {
        "probs": [handed_up[number] for number in sorted(handed_up)],
        "texts": [decode(output.outputs[0].token_ids) for output in found],
    }


def _invented(llm, prompt) -> list[int]:
    """A request whose prompt is cached but for its last token takes the state of one that had a
    proposal: which drafts level 3's test is told of in its first step, where the scheduler invents
    some, as one that is not ours does."""
    assert len(prompt) % 32 == 1
    sampler = worker_of(llm).model_runner.rejection_sampler.sampler
    # It ends inside a proposal, so that the last is never verified.
    _outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=30, seed=0)])
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
        _outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=2, seed=1)])
    return steps[0]


if __name__ == "__main__":
    say(run(json.load(sys.stdin)))
