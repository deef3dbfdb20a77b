"""Promise: an EAGLE-3 head drafts what its checkpoint says, over the states of the target."""

import sys

import pytest
import torch

from tests.conftest import triforce
from tests.generation import generate
from tests.inside import built
from tests.models import ROOT, make_head

sys.path.append(str(ROOT / "examples"))

from train_head.head import Head, Shape
from train_head.states import load_target

pytestmark = pytest.mark.engine

LAYERS, DRAFT_VOCAB, STEPS = (1, 2, 3), 2048, 3


@pytest.fixture(scope="module")
def head(pair, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("head")
    return make_head(folder, pair["target"], draft_vocab=DRAFT_VOCAB, layers=LAYERS)


def expected_logits(head: str, target: str, tokens: list[int], drafts: list[int]) -> list:
    """Compute the head's logits for each of ``drafts`` and the token after, as it was trained.

    Returns:
        [draft_vocab] for each step, by the training script's own module.
    """
    from safetensors.torch import load_file

    model = load_target(target)
    module = Head(Shape.of(model.config, DRAFT_VOCAB))
    weights = load_file(f"{head}/model.safetensors")
    weights.pop("d2t")
    module.load_state_dict(weights)
    with torch.inference_mode():
        output = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer] for layer in LAYERS], -1)
        embeds = model.get_input_embeddings()(torch.tensor([tokens[1:] + drafts]))
        return [logits[0, -1] for logits in module(aux, embeds, len(drafts) + 1)]


@pytest.mark.parametrize("num_tokens", [40, 200])
def test_logits_are_those_of_the_training_script(engines, pair, text, head, num_tokens):
    """Of the first drafts after a prompt that fits the window, and of the head's own states."""
    keys = triforce(model=head, levels="1,3", num_speculative_tokens=STEPS)
    llm = engines.get(pair["target"], keys)
    source = built(llm).speculator.level1.sources["eagle3"]
    prompt = text[10 * num_tokens : 11 * num_tokens]  # which the prefix cache does not have
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
    drafts = [tokens[0] for tokens, _ in fed[1:]]
    wanted = expected_logits(head, pair["target"], context, drafts)
    ids = torch.arange(DRAFT_VOCAB) * 2 + 1
    for (_, logits), expected in zip(fed, wanted, strict=True):
        assert (logits[ids] - expected).abs().max() < 1e-3 * expected.abs().max()
        logits = logits.clone()
        logits[ids] = float("-inf")
        assert logits.max() == float("-inf"), "a token outside the draft vocabulary"


def test_a_target_may_return_its_states_to_none(engines, pair, text, head):
    """Without a request's states nothing is drafted for it."""
    llm = engines.get(pair["target"], triforce(model=head, levels="1,3"))
    source = built(llm).speculator.level1.sources["eagle3"]
    source.states.release("nobody")
    assert not len(source.states)
    generate(llm, [text[:50]], max_tokens=4)
    generate(llm, [text[:50]], max_tokens=4)
    assert source.num_requests <= 1, "the last request is forgotten with the next step"
