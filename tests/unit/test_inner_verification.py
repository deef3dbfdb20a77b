"""Promise: what the inner loop emits is distributed exactly as level 2's distribution.

Power: ``test_samples_follow_level2`` draws 60,000 rounds for each case. A chi-square test at
p < 1e-4 on them finds a total variation of about 0.015; the published reference's mistake
(recovering from p2) is 0.05 to 0.2 here, and the same test must catch it.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from tests.unit import verification_oracle as oracle
from vllm_triforce.core.sampling import SamplingRows
from vllm_triforce.runner_v1 import verification as inner
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sampling import token_distribution

VOCAB = 5
ROUNDS = 60_000


def tables(seed: int, gamma: int):
    """Level 1's and level 2's distributions after every prefix of up to gamma tokens."""
    generator = torch.Generator().manual_seed(seed)

    def table():
        known = {}

        def distribution(prefix):
            if prefix not in known:
                logits = 1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
                known[prefix] = logits.softmax(-1)
            return known[prefix]

        return distribution

    return table(), table()


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_oracle_emits_level2(gamma, seed):
    """The algorithm itself is exact: enumerated, not sampled."""
    level1, level2 = tables(seed, gamma)
    emitted = oracle.emitted_distribution(level1, level2, VOCAB, gamma)
    assert sum(emitted.values()) == pytest.approx(1.0)
    prefixes = {sequence[:i] for sequence in emitted for i in range(len(sequence))}
    for prefix in prefixes:
        found = oracle.marginal_of_token(emitted, prefix, VOCAB)
        torch.testing.assert_close(found, level2(prefix), atol=1e-9, rtol=1e-9)


def test_oracle_shows_the_references_mistake():
    """Recovering from p2 instead of the residual bends the output by a tenth and more."""
    worst = 0.0
    for seed in range(20):
        level1, level2 = tables(seed, 1)
        emitted = oracle.emitted_distribution(
            level1, level2, VOCAB, 1, recover=oracle.recover_from_target
        )
        found = oracle.marginal_of_token(emitted, (), VOCAB)
        worst = max(worst, float((found - level2(())).abs().sum() / 2))
    assert worst > 0.1


def sampled_pvalue(seed: int, gamma: int, lookup: bool) -> float:
    """Chi-square of sampled inner rounds against the oracle's sequences."""
    level1, level2 = tables(seed, gamma)
    if lookup:  # level 1 is certain of its tokens
        certain = {}

        def level1(prefix):
            token = certain.setdefault(prefix, len(certain) % VOCAB)
            return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()

    emitted = oracle.emitted_distribution(level1, level2, VOCAB, gamma)
    noise = InnerNoise(seed, torch.device("cpu"))
    noise.begin([], [(0, 0)])
    counts = dict.fromkeys(emitted, 0)
    for _ in range(ROUNDS // (1 if gamma == 1 else 2)):
        tokens: list[int] = []
        for _ in range(gamma):
            tokens.append(noise.sample(0, level1(tuple(tokens)).float()))
        p1 = [level1(tuple(tokens[:i])).float() for i in range(gamma)]
        p2 = torch.stack([level2(tuple(tokens[:i])).float() for i in range(gamma + 1)])
        counts[tuple(inner.verify_row(tokens, None if lookup else p1, p2, 0, noise))] += 1
    return chi_square(counts, emitted)


def chi_square(counts: dict, probabilities: dict) -> float:
    total = sum(counts.values())
    expected = np.array([probabilities[key] * total for key in counts])
    found = np.array([counts[key] for key in counts], dtype=float)
    if found[expected == 0].sum():
        return 0.0  # emitted what is impossible
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    keep = expected > 0
    return stats.chisquare(found[keep], expected[keep] * found[keep].sum() / total).pvalue


@pytest.mark.parametrize("lookup", [False, True], ids=["draft", "lookup"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_samples_follow_level2(gamma, lookup):
    assert sampled_pvalue(3, gamma, lookup) > 1e-4


def test_the_references_mistake_is_caught(monkeypatch):
    """The same test fails when the recovered token is drawn from p2."""
    monkeypatch.setattr(inner, "residual", lambda target, draft, token: target)
    assert sampled_pvalue(3, 1, False) < 1e-10


def test_token_distribution_is_what_vllm_samples_from():
    """Temperature, min-p, top-k and top-p against a readable computation, row by row."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 40)
    sampling = SamplingRows(
        temperature=torch.tensor([0.0, 0.6, 1.0, 0.6, 1.3, 0.7]),
        top_k=torch.tensor([40, 40, 5, 7, 40, 3]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.5, 0.8, 0.95]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.2]),
    )
    found = token_distribution(logits.clone(), sampling)
    for row in range(6):
        wanted = readable_distribution(
            logits[row].double().numpy(),
            float(sampling.temperature[row]),
            int(sampling.top_k[row]),
            float(sampling.top_p[row]),
            float(sampling.min_p[row]),
        )
        np.testing.assert_allclose(found[row].numpy(), wanted, atol=1e-6)


def readable_distribution(logits, temperature, top_k, top_p, min_p):
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    kept = np.sort(p)[::-1][:top_k].min()
    p[p < kept] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def test_greedy_rows_beside_sampled_ones():
    """A greedy row emits argmaxes, whatever the noise."""
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    sampling = SamplingRows(temperature=torch.tensor([0.0, 1.0]))
    noise = InnerNoise(0, torch.device("cpu"))
    best = logits.argmax(-1).tolist()
    wrong = (best[1] + 1) % VOCAB
    for _ in range(20):
        noise.begin([], [(0, 0), (0, 0)])
        drafted = [[best[0], wrong], [1, 2]]
        probs = [list(torch.eye(VOCAB)[t] for t in row) for row in drafted]
        verified = inner.verify(drafted, probs, logits, sampling, noise)
        assert verified.token_ids[0] == [best[0], best[1]]
        assert verified.num_accepted[0] == 1
        assert len(verified.probs[1]) == len(verified.token_ids[1])


def test_noise_is_reproducible_and_never_repeats():
    """Seeded rows do not depend on their neighbours; other places give other noise."""
    noise = InnerNoise(0, torch.device("cpu"))
    noise.begin([7], [(100, 0)])
    alone = [noise.uniform(0) for _ in range(3)]
    noise.begin([None, 7], [(3, 1), (100, 0)])
    noise.uniform(0)
    assert [noise.uniform(1) for _ in range(3)] == alone
    drawn = set()
    for place in [(100, 0), (100, 1), (101, 0)]:
        noise.begin([7], [place])
        drawn.add(noise.uniform(0))
    assert len(drawn) == 3


@pytest.mark.parametrize("drawn, token", [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_no_draw_gives_an_impossible_token(monkeypatch, drawn, token):
    """Not at the ends of the unit interval either, nor where a product is rounded up."""
    noise = InnerNoise(0, torch.device("cpu"))
    monkeypatch.setattr(noise, "uniform", lambda row: drawn)
    for scale in (1.0, 1 / 3, 1e-30):
        probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]) * scale
        assert noise.sample(0, probs) == token
    monkeypatch.setattr(noise, "uniform", lambda row: 1.0)  # rounded up to the sum
    assert noise.sample(0, probs) == 3


def test_data_parallel_replicas_draw_other_noise_and_the_ranks_of_one_the_same():
    probs = torch.full((1000,), 0.001)

    def drawn(replica: int) -> list[int]:
        noise = InnerNoise(0, torch.device("cpu"), replica=replica)
        noise.begin([], [(0, 0)])
        return [noise.sample(0, probs) for _ in range(20)]

    assert drawn(0) == drawn(0)
    assert len(set(map(tuple, map(drawn, range(4))))) == 4
