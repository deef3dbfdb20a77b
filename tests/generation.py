"""Running prompts and comparing tokens with stock vLLM."""

from vllm import SamplingParams


def generate(llm, prompts: list[list[int]], **params) -> list[list[int]]:
    """Return token ids of the completions; by default greedy and past EOS."""
    params = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(**params),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


# Of a log-probability; float32 attention over thousands of tokens rounds to about 1e-5.
NOISE = 2e-4


def assert_same_tokens(
    stock, prompt: list[int], wanted: list[int], found: list[int], noise: float = NOISE
) -> bool:
    """Assert equal tokens, or a tie of stock vLLM's where they part.

    Args:
        noise: between stock's two best log-probabilities, up to which it is undecided.

    Returns:
        Whether the tokens were identical.
    """
    if wanted == found:
        return True
    place = next(i for i, (a, b) in enumerate(zip(wanted, found)) if a != b)
    output = stock.generate(
        [{"prompt_token_ids": prompt + wanted[:place]}],
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False),
        use_tqdm=False,
    )[0].outputs[0]
    best_two = sorted(output.logprobs[0].items(), key=lambda item: -item[1].logprob)[:2]
    margin = best_two[0][1].logprob - best_two[1][1].logprob
    assert {wanted[place], found[place]} == {token for token, _ in best_two}, (
        f"token {place}: stock {wanted[place]}, TriForce {found[place]}, stock's best {best_two}"
    )
    assert margin < noise, f"token {place} differs and stock's top two are {margin} apart"
    return False
