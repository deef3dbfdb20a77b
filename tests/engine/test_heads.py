"""Promise: a head drafts what its checkpoint says, over the states of the target."""

import pytest
import torch
from vllm import SamplingParams

from tests.conftest import triforce
from tests.generation import generate
from tests.head_oracle import LAYERS, STEPS, VOCAB, expected_logits, mtp_logits
from tests.inside import built, worker_of
from tests.models import as_speculators, make_head, make_mimo
from tests.outputs import run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def heads(pair, tmp_path_factory) -> dict[int, str]:
    """Return heads by the size of their vocabulary."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        size: make_head(folder / str(size), pair["target"], draft_vocab=size, layers=LAYERS)
        for size in (VOCAB // 2, VOCAB)
    }


@pytest.mark.parametrize(
    "num_tokens, draft_vocab, form",
    [(40, VOCAB // 2, "own"), (200, VOCAB, "own"), (50, VOCAB // 2, "speculators")],
)
def test_logits_are_those_of_the_training_script(
    engines, pair, text, heads, tmp_path, num_tokens, draft_vocab, form
):
    """Of the first drafts after a prompt that fits the window, and of the head's own states."""
    head = checkpoint = heads[draft_vocab]
    if form == "speculators":
        checkpoint = as_speculators(tmp_path / form, head, pair["target"])
    llm = engines.get(pair["target"], direct(checkpoint))
    prompt = text[10 * num_tokens : 11 * num_tokens]  # which the prefix cache does not have
    context, drafts, found = first_drafts(llm, prompt)
    wanted = expected_logits(head, pair["target"], context, drafts)
    ids = torch.arange(VOCAB)
    if draft_vocab < VOCAB:
        ids = 2 * ids[:draft_vocab] + 1
    for logits, expected in zip(found, wanted, strict=True):
        assert (logits[ids] - expected).abs().max() < 1e-3 * expected.abs().max()
        logits = logits.clone()
        logits[ids] = float("-inf")  # so that what is left is outside the draft vocabulary
        assert logits.max() == float("-inf")


def test_a_head_takes_the_memory_that_is_reserved(engines, pair, text, heads):
    """Windows and states of ``max_speculating_seqs`` requests; the others take their places."""
    llm = engines.get(pair["target"], direct(heads[VOCAB]) | {"max_speculating_seqs": 2})
    reserved, _ = worker_of(llm).extra_memory()
    source = built(llm).speculator.level1.sources["head"]
    windows = sum(layer.kv_cache.nbytes for layer in source._layers.values())
    assert windows == reserved["the draft's windows"]
    assert source.states._rings.nbytes == reserved["the head's states"]
    drafted: set[str] = set()
    take = source.states.take
    source.states.take = lambda name, *span: drafted.add(name) or take(name, *span)
    try:
        prompts = [text[300 * i : 300 * i + 250] for i in range(4)]
        same = dict(temperature=0, ignore_eos=True, detokenize=False)
        run(llm, prompts, [SamplingParams(**same, max_tokens=n) for n in (6, 12, 24, 24)])
    finally:
        source.states.take = take
    assert len(drafted) == 4


def direct(head: str) -> dict:
    return triforce(model=head, levels="1,3", num_speculative_tokens=STEPS)


def first_drafts(llm, prompt: list[int]) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Return a context, the head's first drafts after it, and the logits of these and one more."""
    source = built(llm).speculator.level1.sources["head"]
    seen, forward = [], source._forward

    def watch(feed, slots):
        logits, outputs = forward(feed, slots)
        seen.append((feed[0].token_ids, logits[0].clone()))
        return logits, outputs

    source._forward = watch
    try:
        (answer,) = generate(llm, [prompt], max_tokens=STEPS + 3)
    finally:
        source._forward = forward
    first = next(i for i, (tokens, _) in enumerate(seen) if len(tokens) > 1)
    context = prompt + answer[:1]
    assert seen[first][0] == context[1:], "the window begins after the first token"
    fed = seen[first : first + STEPS]
    return context, [tokens[0] for tokens, _ in fed[1:]], [logits for _, logits in fed]


def test_mtp_logits_are_those_of_its_layer(engines, text, tmp_path):
    """The norms of the random layer are all ones, as the target's."""
    target = make_mimo(tmp_path / "mimo", vocab_size=4096, std=0.1)
    llm = engines.get(target, direct(target))
    context, drafts, found = first_drafts(llm, text[:60])
    for logits, expected in zip(found, mtp_logits(target, context, drafts), strict=True):
        assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()
