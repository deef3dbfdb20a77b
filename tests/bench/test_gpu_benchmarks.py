"""Promise: a GPU session's comparison of greedy tokens can fail."""

from types import SimpleNamespace

from benchmarks.gpu.test_exactness import difference


def test_tokens_may_part_only_where_both_are_near_stocks_best():
    best = [{1: -0.1, 2: -3.0}, {5: -0.7, 6: -0.8, 7: -0.8}, {3: -0.1, 4: -3.0}]
    logprobs = [
        {token: SimpleNamespace(logprob=value) for token, value in each.items()} for each in best
    ]
    stock = SimpleNamespace(token_ids=[1, 5, 3], logprobs=logprobs)
    assert difference(stock, [1, 5, 3], 0.125) is None
    assert difference(stock, [1, 6, 9], 0.125) is None, "later tokens answer another text"
    assert difference(stock, [1, 7, 3], 0.125) is None, "three are near"
    assert "token 0" in difference(stock, [2, 5, 3], 0.125), "far apart"
    assert "token 1" in difference(stock, [1, 9, 3], 0.125), "not among the best"
    assert "2 tokens" in difference(stock, [1, 5], 0.125)
