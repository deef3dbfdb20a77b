"""Comparing whole outputs, not only tokens, with stock vLLM's."""

import math
from contextlib import contextmanager

import torch
from vllm import SamplingParams

from tests import calibration
from tests.generation import NOISE, assert_same_tokens
from vllm_triforce.metrics.report import counters_of

# Log-probabilities of one full pass over several tokens against one over a single token.
LOGPROB_TOLERANCE = 1e-3


def greedy(max_tokens: int | None) -> SamplingParams:
    """Return parameters of an answer that goes on past the end of text."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(llm, prompts: list[list[int]] | list[dict], params: list, **kwargs):
    """Generate outputs of prompts, tokens or vLLM's, with a ``SamplingParams`` each."""
    prompts = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


@contextmanager
def speculating(llm, rejections: bool = True):
    """Fail unless proposals were accepted, and rejected, meanwhile."""
    before = counters_of(llm)
    yield
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted > 0, counted
    if rejections:
        assert counted.num_level3_rejections > 0, counted


def assert_same_outputs(stock, wanted, found) -> int:
    """Compare tokens, text, finish reason, usage and log-probabilities of greedy requests.

    Returns:
        The number of completions that were token-identical; the others are proven ties.
    """
    identical = 0
    assert len(wanted) == len(found)
    for w, f in zip(wanted, found):
        assert f.prompt_token_ids == w.prompt_token_ids
        assert f.finished == w.finished
        assert len(f.outputs) == len(w.outputs)
        assert_close_tables(w.prompt_logprobs, f.prompt_logprobs)
        for a, b in zip(w.outputs, f.outputs):
            wanted_ids, found_ids = list(a.token_ids), list(b.token_ids)
            if wanted_ids != found_ids:
                assert stock is not None, (wanted_ids, found_ids, a, b)
                assert_same_tokens(stock, list(w.prompt_token_ids), wanted_ids, found_ids)
                continue
            identical += 1
            assert b.text == a.text
            assert (b.finish_reason, b.stop_reason) == (a.finish_reason, a.stop_reason)
            assert_close_tables(a.logprobs, b.logprobs)
            if a.logprobs is not None:
                assert len(b.logprobs) == len(b.token_ids)
                assert math.isclose(
                    a.cumulative_logprob, b.cumulative_logprob, abs_tol=LOGPROB_TOLERANCE * 50
                )
    return identical


def assert_close_tables(wanted, found) -> None:
    """Compare sequences of {token: Logprob}; None where there is none."""
    assert (wanted is None) == (found is None)
    for place, (w, f) in enumerate(zip(wanted or [], found or [])):
        assert (w is None) == (f is None)
        if w is None:
            continue
        # Tokens at the end of a top-k list may change places where they are as likely.
        for token in w.keys() & f.keys():
            a, b = w[token], f[token]
            assert _is_close(a.logprob, b.logprob), (place, token, w, f)
            assert _is_close_rank(token, w, b.rank), (place, token, w, f)
            assert a.decoded_token == b.decoded_token, (place, token, w, f)
        for only, table in ((w.keys() - f.keys(), w), (f.keys() - w.keys(), f)):
            lowest = min(entry.logprob for entry in table.values())
            for token in only:
                # Both are -inf where a mask leaves fewer tokens than are listed.
                logprob = table[token].logprob
                assert logprob == lowest or logprob - lowest < NOISE + LOGPROB_TOLERANCE, (w, f)
        assert len(w) == len(f)


def _is_close(wanted: float, found: float) -> bool:
    return wanted == found or abs(wanted - found) < LOGPROB_TOLERANCE


def _is_close_rank(token: int, table, found: int | None) -> bool:
    """True if a rank is the table's, or noise may have exchanged it with neighbors."""
    wanted, logprob = table[token].rank, table[token].logprob
    if wanted == found or wanted is None or found is None:
        return wanted == found
    by_rank = {entry.rank: entry.logprob for entry in table.values()}
    between = range(min(wanted, found), max(wanted, found) + 1)
    if all(rank in by_rank for rank in between):
        return all(_is_close(logprob, by_rank[rank]) for rank in between)
    # Below the listed tokens many are nearly as likely as their neighbours.
    return abs(wanted - found) <= 1 + wanted // 50


def p_values(stock, outputs: list, top_k: int, prompts: list[dict] | None = None) -> list[float]:
    """Compare tokens sampled of ``top_k`` at temperature 1 with stock's log-probabilities, by each
    test of ``calibration``; tokens are named by their rank.

    Args:
        prompts: vLLM's, where they are more than tokens.
    """
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, detokenize=False)
    prompts = prompts or [{"prompt_token_ids": output.prompt_token_ids} for output in outputs]
    new = [list(output.outputs[0].token_ids) for output in outputs]
    whole = [{**p, "prompt_token_ids": [*p["prompt_token_ids"], *n]} for p, n in zip(prompts, new)]
    probs, ranks = [], []
    for token_ids, read in zip(new, run(stock, whole, [asked] * len(whole))):
        tables = read.prompt_logprobs[-len(token_ids) :]
        for token, table in zip(token_ids, tables, strict=True):
            best = sorted(table, key=lambda each: -table[each].logprob)[:top_k]
            assert token in best, "a token that top_k excludes"
            ranks.append(best.index(token))
            probs.append(torch.tensor([table[t].logprob for t in best]).double().softmax(0))
    return calibration.p_values(torch.stack(probs), torch.tensor(ranks))
