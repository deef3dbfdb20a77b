"""Logits of heads by an independent computation, for the tests of both runners."""

import copy
import sys

import torch

from tests.models import ROOT

sys.path.append(str(ROOT / "examples"))

from train_head.head import Head, Shape
from train_head.states import load_target

LAYERS, VOCAB, STEPS = (1, 2, 3), 4096, 3


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
