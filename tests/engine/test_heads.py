"""Promise: a head drafts what its checkpoint says, over the states of the target."""

import copy
import sys

import pytest
import torch

from tests.conftest import triforce
from tests.generation import generate
from tests.inside import built
from tests.models import ROOT, make_head, make_mimo

sys.path.append(str(ROOT / "examples"))

from train_head.head import Head, Shape
from train_head.states import load_target

pytestmark = pytest.mark.engine

LAYERS, VOCAB, STEPS = (1, 2, 3), 4096, 3


@pytest.fixture(scope="module")
def heads(pair, tmp_path_factory) -> dict[int, str]:
    """Return heads by the size of their vocabulary."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        size: make_head(folder / str(size), pair["target"], draft_vocab=size, layers=LAYERS)
        for size in (VOCAB // 2, VOCAB)
    }


def expected_logits(head: str, target: str, tokens: list[int], drafts: list[int]) -> list:
    """Compute the head's logits for each of ``drafts`` and the token after, as it was trained.

    Returns:
        [draft_vocab] for each step, by the training script's own module.
    """
    from safetensors.torch import load_file

    model = load_target(target)
    weights = load_file(f"{head}/model.safetensors")
    weights.pop("d2t", None)
    module = Head(Shape.of(model.config, len(weights["lm_head.weight"])))
    module.load_state_dict(weights)
    with torch.inference_mode():
        output = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer] for layer in LAYERS], -1)
        embeds = model.get_input_embeddings()(torch.tensor([tokens[1:] + drafts]))
        return [logits[0, -1] for logits in module(aux, embeds, len(drafts) + 1)]


@pytest.mark.parametrize("num_tokens, draft_vocab", [(40, VOCAB // 2), (200, VOCAB)])
def test_logits_are_those_of_the_training_script(
    engines, pair, text, heads, num_tokens, draft_vocab
):
    """Of the first drafts after a prompt that fits the window, and of the head's own states."""
    head = heads[draft_vocab]
    llm = engines.get(pair["target"], direct(head))
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


def mtp_logits(folder: str, tokens: list[int], drafts: list[int]) -> list[torch.Tensor]:
    """Compute the logits of MiMo's MTP layer as ``expected_logits()`` does.

    Its input is a projection of the last layer's output before the final norm, and of the next
    token's embedding, zero at position 0; its own output takes the place of the former.
    """
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    stem = "model.mtp_layers.0."
    weights = load_file(f"{folder}/model.safetensors")
    own = {name.removeprefix(stem): w for name, w in weights.items() if name.startswith(stem)}
    block, norm = copy.deepcopy(model.model.layers[0]), model.model.norm
    block.load_state_dict({name: own[name] for name in block.state_dict()})
    states = []
    norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.inference_mode():
        model.model(torch.tensor([tokens[:-1]]))
        (state,), logits = states, []
        for count in range(len(drafts) + 1):
            embeds = model.get_input_embeddings()(torch.tensor([tokens[1:] + drafts[:count]]))
            embeds[:, 0] = 0
            inputs = torch.cat([norm(state), norm(embeds)], -1) @ own["input_proj.weight"].T
            length = inputs.shape[1]
            position = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(inputs, position)
            output = block(inputs, attention_mask=mask, position_embeddings=rotary)
            output = norm(output[0] if isinstance(output, tuple) else output)
            logits.append(model.lm_head(output)[0, -1])
            state = torch.cat([state, output[:, -1:]], 1)
    return logits


def test_mtp_logits_are_those_of_its_layer(engines, text, tmp_path):
    """The norms of the random layer are all ones, as the target's."""
    target = make_mimo(tmp_path / "mimo", vocab_size=4096, std=0.1)
    llm = engines.get(target, direct(target))
    context, drafts, found = first_drafts(llm, text[:60])
    for logits, expected in zip(found, mtp_logits(target, context, drafts), strict=True):
        assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


def test_states_are_forgotten_with_their_requests(engines, pair, text, heads):
    keys = triforce(model=heads[VOCAB], levels="1,3", num_speculative_tokens=STEPS)
    llm = engines.get(pair["target"], keys)
    source = built(llm).speculator.level1.sources["head"]
    generate(llm, [text[:50]], max_tokens=4)
    generate(llm, [text[:50]], max_tokens=4)
    assert source.num_requests <= 1, "the last request is forgotten with the next step"
