"""Greedy outputs against stock vLLM's, and stock's margin where they part."""

from dataclasses import dataclass

from vllm.sampling_params import SamplingParams

# Distance of stock's two best log-probabilities within which rounding may choose. Attention in
# float32 over thousands of tokens rounds to about 1e-5; two steps of a bfloat16 logit between 8 and
# 16 are 0.125.
TIE = {"float32": 2e-4, "bfloat16": 0.15, "float16": 0.02}

IDENTICAL, A_TIE, DIFFERENT = "identical", "tie", "different"


@dataclass
class Verdict:
    """Verdict on the worst request of a batch.

    Args:
        place: first token that differs, in the output.
        margin: distance of stock's two best log-probabilities there.
    """

    outcome: str
    request: int | None = None
    place: int | None = None
    margin: float | None = None


def judge(
    stock, prompts: list[list[int]], stock_ids: list[list[int]], ids: list[list[int]], dtype: str
) -> Verdict:
    """Compare the tokens of a batch with stock vLLM's.

    Args:
        stock: engine without speculation; it decodes only if tokens differ.
    """
    worst = Verdict(IDENTICAL)
    for i, (prompt, expected, answer) in enumerate(zip(prompts, stock_ids, ids)):
        if answer == expected:
            continue
        place = next(k for k, (a, b) in enumerate(zip(expected, answer)) if a != b)
        (first, high), (second, low) = _best_two(stock, prompt + expected[:place])
        is_tie = {expected[place], answer[place]} == {first, second} and high - low < TIE[dtype]
        verdict = Verdict(A_TIE if is_tie else DIFFERENT, i, place, high - low)
        if not is_tie:
            return verdict
        if worst.outcome == IDENTICAL:
            worst = verdict
    return worst


def _best_two(stock, prompt: list[int]) -> list[tuple[int, float]]:
    output = stock.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False),
        use_tqdm=False,
    )[0].outputs[0]
    best = sorted(output.logprobs[0].items(), key=lambda item: -item[1].logprob)
    return [(token, entry.logprob) for token, entry in best[:2]]
