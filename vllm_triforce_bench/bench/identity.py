"""Are greedy outputs stock's? Where they part, is stock vLLM itself undecided?"""

from dataclasses import asdict, dataclass

from vllm.sampling_params import SamplingParams

# Between stock's two best log-probabilities, up to which a rounding may choose: float32 attention
# over thousands of tokens rounds to about 1e-5; two steps of a bfloat16 logit between 8 and 16
# are 0.125.
TIE = {"float32": 2e-4, "bfloat16": 0.15, "float16": 0.02}

IDENTICAL, A_TIE, DIFFERENT = "identical", "tie", "different"


@dataclass
class Verdict:
    """On one batch; of several requests the worst."""

    outcome: str
    request: int | None = None
    place: int | None = None
    """Of the first token that differs, in the output."""
    margin: float | None = None
    """Between stock's two best log-probabilities there."""

    def to_dict(self) -> dict:
        return asdict(self)


def judge(
    stock, prompts: list[list[int]], wanted: list[list[int]], found: list[list[int]], dtype: str
) -> Verdict:
    """Compares a batch's tokens with stock's.

    Args:
        stock: the engine without speculation; asked only where tokens differ.
    """
    worst = Verdict(IDENTICAL)
    for i, (prompt, ours, theirs) in enumerate(zip(prompts, wanted, found)):
        if ours == theirs:
            continue
        place = first_difference(ours, theirs)
        best_two = _best_two(stock, prompt + ours[:place])
        margin = best_two[0][1] - best_two[1][1]
        is_tie = {ours[place], theirs[place]} == {token for token, _ in best_two}
        is_tie = is_tie and margin < TIE[dtype]
        verdict = Verdict(A_TIE if is_tie else DIFFERENT, i, place, margin)
        if worst.outcome == IDENTICAL or verdict.outcome == DIFFERENT:
            worst = verdict
        if worst.outcome == DIFFERENT:
            break
    return worst


def first_difference(wanted: list[int], found: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(wanted, found)) if a != b)


def _best_two(stock, prompt: list[int]) -> list[tuple[int, float]]:
    output = stock.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False),
        use_tqdm=False,
    )[0].outputs[0]
    by_value = sorted(output.logprobs[0].items(), key=lambda item: -item[1].logprob)
    return [(token, found.logprob) for token, found in by_value[:2]]
