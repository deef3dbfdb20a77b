"""Were these tokens drawn from these distributions? Two chi-square tests and one of the surprise.

The distributions may differ from token to token and depend on the tokens before them, so
long sequences test every place of every proposal at once.
"""

import torch


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable is larger."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))


def assert_rate(accepted: int, tests: int, rate: float, least: int = 100) -> None:
    """Assert a given rate, within three standard deviations of more than ``least`` tests."""
    assert tests > least
    assert abs(accepted / tests - rate) <= 3 * (rate * (1 - rate) / tests) ** 0.5


def p_values(probs: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """By each test below."""
    tests = (frequency_p_value, transform_p_value, surprise_p_value)
    return [test(probs, tokens) for test in tests]


def frequency_p_value(probs: torch.Tensor, tokens: torch.Tensor) -> float:
    """Compare how often each token came with how often it should have.

    Args:
        probs: [num_tokens, vocab_size], float64.
        tokens: [num_tokens].
    """
    surplus = torch.bincount(tokens, minlength=probs.shape[1]) - probs.sum(0)
    covariance = torch.diag(probs.sum(0)) - probs.T @ probs
    inverse = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-9)
    degrees = int(torch.linalg.matrix_rank(covariance, hermitian=True, rtol=1e-9))
    return chi_square_tail(float(surplus @ inverse @ surplus), degrees)


def transform_p_value(probs: torch.Tensor, tokens: torch.Tensor, num_bins: int = 20) -> float:
    """Puts each token at a random place of its interval of the cumulative distribution; the
    places are uniform if, and only if, the tokens follow the distributions. Likely tokens come
    first, so that a distribution too sharp or too flat shows in whatever context."""
    probs, order = probs.sort(1, descending=True)
    tokens = (order == tokens[:, None]).int().argmax(1)
    noise = torch.rand(len(tokens), generator=torch.Generator().manual_seed(0), dtype=probs.dtype)
    own = probs.gather(1, tokens[:, None])[:, 0]
    below = probs.cumsum(1).gather(1, tokens[:, None])[:, 0] - own
    places = (below + noise * own).clamp(0, 1 - 1e-12)
    counts = torch.bincount((places * num_bins).long(), minlength=num_bins).double()
    expected = len(tokens) / num_bins
    return chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), num_bins - 1)


def surprise_p_value(probs: torch.Tensor, tokens: torch.Tensor) -> float:
    """Compares how surprising the tokens are, in nats, with how surprising they should be: one
    number, so that a few hundred tokens show what lets through tokens that the target does not
    say, or too few of those that it seldom says."""
    logs = probs.clamp(min=1e-300).log()
    mean = (probs * logs).sum(1)
    variance = (probs * logs**2).sum(1) - mean**2
    surplus = (logs.gather(1, tokens[:, None])[:, 0] - mean).sum()
    return float(torch.special.erfc(surplus.abs() / (2 * variance.sum()).sqrt()))
