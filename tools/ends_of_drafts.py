"""Replay where an EAGLE-3 head's drafts end: fixed lengths against the rule that serves.

    python tools/ends_of_drafts.py build/smollm2/gqa examples/models/smollm2_head \
        --texts FILE ... --temperature 1 --seconds 44.5 2.8 6.7

The target writes answers to excerpts of the texts. At each place of an answer the head drafts, as
if the answer were its own drafts; its distributions and the target's give each token's acceptance.
A simulation: speeds follow from the given seconds, of one request at a time.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from train_head.head import Head, Shape  # noqa: E402

from vllm_triforce.controller.stop_rule import ConfidenceRates, StopRule  # noqa: E402

LONGEST, WINDOW, ANSWER = 6, 300, 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--answers", type=int, default=6, help="of each text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=3,
        required=True,
        metavar=("PLAIN", "PASS", "TOKEN"),
        help="milliseconds of a plain step, a pass of the head, a verified token",
    )
    args = parser.parse_args()
    answers = write_answers(args)
    rows = acceptances(args, answers)
    plain_s, pass_s, token_s = args.seconds
    print("acceptance of a token:", f"{torch.cat([chance for chance, _ in rows]).mean():.3f}")
    for length in range(LONGEST + 1):
        tokens = torch.cat([chance[:, :length].cumprod(1).sum(1) + 1 for chance, _ in rows])
        seconds = plain_s + length * (pass_s + token_s)
        print(f"{length} tokens: {tokens.mean() * plain_s / seconds:.3f}x")
    print(f"the rule: {ruled(rows, args.temperature == 0, plain_s, pass_s, token_s):.3f}x")


def write_answers(args) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers by the target, as token ids."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(args.target, dtype="float32", max_model_len=args.context + ANSWER, enforce_eager=True)
    prompts = []
    for text in args.texts:
        ids = llm.get_tokenizer()(text.read_text(), add_special_tokens=False)["input_ids"]
        step = max(1, (len(ids) - args.context) // args.answers)
        prompts += [ids[i * step :][: args.context] for i in range(args.answers)]
    params = SamplingParams(temperature=args.temperature, max_tokens=ANSWER, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [(p, list(out.outputs[0].token_ids)) for p, out in zip(prompts, outputs)]


@torch.inference_mode()
def acceptances(args, answers) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each answer, the acceptance and the confidence of the tokens drafted at a place.

    Both are [num_places, LONGEST].
    """
    from safetensors.torch import load_file
    from train_head.states import aux_layers, load_target

    weights = load_file(f"{args.head}/model.safetensors")
    offsets = weights.pop("d2t")
    vocab = offsets + torch.arange(len(offsets))
    model = load_target(args.target)
    head = Head(Shape.of(model.config, len(vocab)))
    head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers, rows = aux_layers(model.config.num_hidden_layers), []
    for prompt, answer in answers:
        tokens = torch.tensor([prompt + answer])
        states = model.model(tokens, output_hidden_states=True)
        aux = torch.cat([states.hidden_states[layer] for layer in layers], -1)
        first = len(prompt) - WINDOW
        count = WINDOW + len(answer) - LONGEST
        embeds = embeddings[tokens[:, first + 1 : first + count + LONGEST]]
        steps = head(aux[:, first : first + count], embeds, LONGEST)
        chances, confidences = [], []
        for step, logits in enumerate(steps):
            drafted = logits[0, WINDOW:]
            at = len(prompt) + 1 + step
            wanted = states.last_hidden_state[0, at : at + len(drafted)] @ output.T
            confidences.append(distribution(drafted, args.temperature or 1.0).amax(-1))
            p, q = (distribution(x, args.temperature) for x in (wanted, drafted))
            chances.append(torch.minimum(p[:, vocab], q).sum(-1))
        rows.append((torch.stack(chances, 1), torch.stack(confidences, 1)))
    return rows


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature:
        return (logits / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()


def ruled(rows, is_greedy: bool, plain_s: float, pass_s: float, token_s: float) -> float:
    """Return the speed-up over plain decoding, with the prior rates and each answer's own mean."""
    tokens = seconds = 0.0
    rates = ConfidenceRates(is_greedy).values()
    verify_s = [[n * token_s for n in range(LONGEST + 1)]]
    for chances, confidences in rows:
        mean = float(chances.mean())
        for chance, confidence in zip(chances.tolist(), confidences.tolist()):
            rule = StopRule("head", plain_s, pass_s, verify_s, 1, [rates], [mean])
            passes, survived, tokens = 0, 1.0, tokens + 1
            while passes < LONGEST and rule.goes_on(0):
                passes += 1
                if not rule.keeps(0, confidence[passes - 1]):
                    break
                survived *= chance[passes - 1]
                tokens += survived
            seconds += plain_s + passes * pass_s + verify_s[0][len(rule.classes[0])]
    return tokens * plain_s / seconds


if __name__ == "__main__":
    main()
