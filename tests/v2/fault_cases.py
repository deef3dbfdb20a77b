"""NaN, grammars and named log-probabilities on Model Runner V2; run by run_case.py."""

import gc

from tests.models import PAIR, held_out_tokens
from tests.v2.engine import make_engine, speculator_of, watch, worker_of

NUM_TOKENS = 24
# gamma 2 and 6 tokens: a proposal is two rounds or more.
KEYS = {"model": str(PAIR / "draft"), "retrieval_budget": 128}


def run() -> dict:
    stock = make_engine(str(PAIR / "target"), skip_tokenizer_init=False)
    text = held_out_tokens(stock.get_tokenizer(), 700)
    # The third has slots beyond those of the block that the others end in.
    prompts = [text[:400], text[100:370], text[300:618]]
    wanted = generate(stock, prompts, {})
    named = dict(logprob_token_ids=[5, 9, 11])
    wanted_named = logprobs(stock, prompts, [{}, named, {}])
    del stock
    gc.collect()
    llm = make_engine(str(PAIR / "target"), KEYS, skip_tokenizer_init=False)
    results = {"named": _named(llm, prompts, [{}, named, {}], wanted_named)}
    sampled = dict(temperature=1.0, top_k=1)
    for name, own, level in (("greedy", {}, 1), ("sampled", sampled, 1), ("sampled", sampled, 2)):
        results[f"nan_{name}_{level}"] = _nan(llm, prompts, own, wanted, level)
    results["grammar"] = _grammar(llm, prompts)
    results["padded"] = _padded(llm, prompts[0][:321])
    return results


def generate(llm, prompts, params: dict) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs(llm, prompts, [params] * len(prompts))]


def outputs(llm, prompts, params: list[dict]):
    from vllm import SamplingParams

    common = dict(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    rows = [SamplingParams(**{**common, **own}) for own in params]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, rows, use_tqdm=False)


def logprobs(llm, prompts, params: list[dict]) -> list:
    """Of each request, by place: log-probabilities by token."""
    return [
        [
            {str(token): entry.logprob for token, entry in place.items()}
            for place in output.outputs[0].logprobs or []
        ]
        for output in outputs(llm, prompts, params)
    ]


def _named(llm, prompts, params, wanted) -> dict:
    before = counted(llm)
    found = logprobs(llm, prompts, params)
    furthest = [
        abs(ours[token] - theirs[token])
        for row, wanted_row in zip(found, wanted)
        for ours, theirs in zip(row, wanted_row)
        for token in theirs.keys() & ours.keys()
    ]
    return {
        "same_tokens": [[sorted(p) for p in row] for row in found]
        == [[sorted(p) for p in row] for row in wanted],
        "lengths": [len(row) for row in wanted],
        "furthest": max(furthest, default=None),
        "accepted": counted(llm)["num_level2_accepted"] - before["num_level2_accepted"],
    }


def counted(llm) -> dict:
    return speculator_of(llm).counters.to_dict()


class Poison:
    """Makes a NaN of the first request's newest token in one pass of a level that it takes part
    in, keys and values too."""

    def __init__(self, model, layer, rows) -> None:
        self._model, self._layer, self._rows = model, layer, rows
        self.num_passes = 0
        self.has_struck = False

    def __call__(self, **inputs):
        self.num_passes += 1
        takes_part = self._rows.length[0] < self._rows.room[0] - 1
        if self.has_struck or self.num_passes < 5 or not takes_part:
            return self._model(**inputs)
        self.has_struck = True
        handle = self._layer.register_forward_pre_hook(self._hook)
        try:
            return self._model(**inputs)
        finally:
            handle.remove()

    @staticmethod
    def _hook(module, args):
        positions, hidden, *rest = args
        hidden = hidden.clone()
        hidden[0] = float("nan")
        return positions, hidden, *rest


def _nan(llm, prompts, params, wanted, level: int) -> dict:
    triforce = speculator_of(llm)._built.triforce
    part = triforce.level2 if level == 2 else triforce.level1
    passes = [part._pass] if level == 2 else [part._step]
    layer = passes[0]._model.model.layers[2 if level == 2 else 0]
    before = counted(llm)
    poison = Poison(passes[0]._model, layer, speculator_of(llm)._built.rows)
    passes[0]._model = poison
    with watch(triforce, "propose") as proposals:
        try:
            found = generate(llm, prompts, params)
        finally:
            passes[0]._model = poison._model
    after = counted(llm)
    again = generate(llm, prompts, params)
    end = counted(llm)
    caches = [layer.kv_cache for layer in _layers(llm)]
    return {
        "same": found == wanted,
        "poisoned": poison.has_struck,
        "nan_requests": after["num_nan_requests"] - before["num_nan_requests"],
        # A request that is disabled takes no part any more.
        "rows": [len(args[0]) for args, _ in proposals],
        "accepted": after["num_level2_accepted"] - before["num_level2_accepted"],
        "same_again": again == wanted,
        "nan_requests_again": end["num_nan_requests"] - after["num_nan_requests"],
        "accepted_again": end["num_level2_accepted"] - after["num_level2_accepted"],
        "finite": all(bool(cache.isfinite().all()) for cache in caches),
        "held": speculator_of(llm).held_requests(),
    }


def _layers(llm) -> list:
    context = worker_of(llm).vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(layer, "kv_cache")]


def _grammar(llm, prompts) -> dict:
    """What the outer test is handed for sampled requests, of which the first has a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

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
            length = int(speculator._built.triforce.num_proposed[state])
            if length and runner.sampler.sampling_states.temperature.np[state] > 0:
                probs = speculator.draft_logits[state, :length].float().softmax(-1)
                own = probs.gather(1, tokens[row, :length, None])[:, 0].tolist()
                handed_up.setdefault(int(name.split("-")[0]), []).extend(own)
        return tokens

    speculator.propose = propose
    try:
        found = outputs(llm, prompts, params)
    finally:
        del speculator.propose
    decode = llm.get_tokenizer().decode
    return {
        "probs": [handed_up[number] for number in sorted(handed_up)],
        "texts": [decode(output.outputs[0].token_ids) for output in found],
    }


def _padded(llm, prompt) -> list[int]:
    """A request whose prompt is cached but for its last token takes the state of one that had a
    proposal: which drafts the outer test is told of in its first step."""
    assert len(prompt) % 32 == 1
    sampler = type(worker_of(llm).model_runner.rejection_sampler)
    # It ends inside a proposal, so that the last is never verified.
    outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=30, seed=0)])
    steps = []
    original = sampler._verify

    def verify(self, logits, draft_logits, draft_sampled, *rest):
        steps.append(draft_sampled[1:].tolist())
        return original(self, logits, draft_logits, draft_sampled, *rest)

    sampler._verify = verify
    try:
        outputs(llm, [prompt], [dict(temperature=1.0, max_tokens=2, seed=1)])
    finally:
        sampler._verify = original
    return steps[0]
