"""Promise: the fast top-k and top-p masks are vLLM's own, token for token."""

import numpy as np
import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_triforce.runner_v1 import top_p
from vllm_triforce.runner_v1.top_p import (
    MAX_CANDIDATES,
    ROUNDING,
    FastTopP,
    TopPMasks,
    apply_top_k_top_p,
)
from vllm_triforce.runner_v1.top_p_rows import keep_rows


def vllms(logits, k, p):
    """Mask by vLLM's own function, which sorts."""
    return topk_topp_sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p)


@pytest.fixture
def sorted_rows(monkeypatch):
    """Collect the numbers of rows that are left to vLLM's function."""
    found = []
    original = top_p.vllm_masks

    def spy(logits, k, p):
        found.append(len(logits))
        return original(logits, k, p)

    monkeypatch.setattr(top_p, "vllm_masks", spy)
    return found


@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0, 12.0])
@pytest.mark.parametrize("vocab_size", [300, 4096, 20_000])
@pytest.mark.parametrize("with_k", [False, True])
def test_same_as_vllm(spread, vocab_size, with_k):
    """Rows are flat to peaked, with every p from almost 0 to 1."""
    draw = torch.Generator().manual_seed(int(spread * 10) + vocab_size)
    logits = spread * torch.randn(64, vocab_size, generator=draw)
    p = torch.rand(64, generator=draw)
    p[:6] = torch.tensor([1e-6, 0.5, 0.9, 0.999, 1.0, 1.0])
    k = None
    if with_k:
        k = torch.randint(1, 200, (64,), generator=draw, dtype=torch.int32)
        k[::3] = vocab_size
        k[1] = 1
    wanted = vllms(logits, k, p)
    assert torch.equal(apply_top_k_top_p(logits.clone(), k, p), wanted)


def test_ties_are_left_to_vllm(sorted_rows):
    """Of equally likely tokens at the edge of top-p vLLM's sort keeps some."""
    logits = torch.zeros(4, 5000)
    logits[:, 100:120] = torch.tensor([9.0] * 20)
    logits[1, 100:120] = torch.linspace(9, 12, 20)
    logits[2] = torch.linspace(0, 200, 5000)[torch.randperm(5000)]
    p = torch.tensor([0.5, 0.5, 0.5, 0.9])
    found = apply_top_k_top_p(logits.clone(), None, p)
    assert torch.equal(found, vllms(logits, None, p)) and sorted_rows == [2]  # rows 0 and 3
    k = torch.tensor([5, 5, 5, 5], dtype=torch.int32)  # all 20 equal ones are among the top 5
    assert torch.equal(apply_top_k_top_p(logits.clone(), k, p), vllms(logits, k, p))


def test_a_tie_with_a_token_below_the_floor_is_left_to_vllm():
    p = np.float32(0.9)
    floor = np.float32((1 - np.float64(p)) / 256)
    weights = np.zeros((2, 600), dtype=np.float32)
    weights[:, 0] = p - floor / 2
    weights[:, 1] = np.nextafter(floor, np.float32(1)), 1.5 * floor
    weights[:, 2:250] = np.nextafter(floor, np.float32(0))
    masked, is_sure = np.empty_like(weights), np.empty(2, dtype=np.bool_)
    totals, wanted = np.ones(2, dtype=np.float32), np.full(2, p)
    logits = weights - 1  # any in the same order
    keep_rows(logits, weights, totals, wanted, ROUNDING, MAX_CANDIDATES, masked, is_sure)
    assert is_sure.tolist() == [False, True]
    assert np.flatnonzero(masked[1] > -np.inf).tolist() == [0, 1]


def test_a_sum_that_rounding_decides_is_left_to_vllm(sorted_rows):
    logits = torch.full((3, 4000), -20.0)
    logits[:, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    p = torch.tensor([0.8, 0.8 + 1e-4, 0.8 - 1e-7])
    found = apply_top_k_top_p(logits.clone(), None, p)
    assert torch.equal(found, vllms(logits, None, p)) and sorted_rows == [2]


def test_most_rows_need_no_sort(sorted_rows):
    """Rows are peaked like a model's."""
    draw = torch.Generator().manual_seed(5)
    logits = 5 * torch.randn(200, 32_000, generator=draw)
    logits[100:] *= 0.8
    p = torch.full((200,), 0.9)
    wanted = vllms(logits, None, p)
    probs = logits.softmax(-1)
    held = probs.masked_fill(probs < 0.1 / 256, 0.0).sum(-1)  # by what is looked at first
    assert 5 < (held < 0.9).sum() < 150
    assert torch.equal(apply_top_k_top_p(logits, None, p), wanted)
    assert sum(sorted_rows) < 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_left_to_vllm(value):
    logits = torch.randn(3, 5000)
    logits[1, 7] = value
    p = torch.full((3,), 0.9)
    found, wanted = apply_top_k_top_p(logits.clone(), None, p), vllms(logits, None, p)
    assert torch.equal(found.nan_to_num(5.0), wanted.nan_to_num(5.0))


def test_rounding_is_bounded():
    """The sums of both sides in float32 together stay within a quarter of ROUNDING."""
    for spread in (0.0, 1.0, 5.0):
        logits = spread * torch.randn(2, 262_144, generator=torch.Generator().manual_seed(1))
        ascending = logits.sort(-1).values
        exact = ascending.double().softmax(-1).cumsum(-1)
        theirs = (ascending.softmax(-1).cumsum(-1) - exact).abs().max()
        largest = logits.amax(-1, keepdim=True)
        total = largest[:, 0] + (logits - largest).exp().sum(-1).log()
        ours = (total - logits.double().logsumexp(-1)).abs().max()
        assert theirs + ours < ROUNDING / 4


@pytest.mark.parametrize(
    "size, dtype, k", [(1000, None, None), (10_000, torch.bfloat16, None), (10_000, None, 3)]
)
def test_small_vocabularies_other_dtypes_and_top_k_alone_are_vllms(size, dtype, k):
    logits = torch.randn(1, size, dtype=dtype)
    k = None if k is None else torch.tensor([k], dtype=torch.int32)
    p = torch.tensor([0.7]) if k is None else None
    assert torch.equal(apply_top_k_top_p(logits.clone(), k, p), vllms(logits, k, p))


def test_flat_distributions_are_soon_left_to_vllm(monkeypatch):
    """Peaked rows bring the search for candidates back."""
    tried = []
    original = top_p.among_candidates

    def spy(logits, *args):
        tried.append(len(logits))
        return original(logits, *args)

    monkeypatch.setattr(top_p, "among_candidates", spy)
    draw, masks = torch.Generator().manual_seed(1), TopPMasks()
    p = torch.full((4,), 0.9)

    def num_tried(spread: float, num_calls: int) -> int:
        tried.clear()
        for _ in range(num_calls):
            logits = spread * torch.randn(4, 4096, generator=draw)
            assert torch.equal(masks(logits.clone(), None, p), vllms(logits, None, p))
        return len(tried)

    assert num_tried(0.1, 200) < 14
    assert num_tried(8.0, 200) > 130
    assert num_tried(8.0, 50) == 50


def test_vllm_has_its_own_back():
    """The masks are exchanged only while a step's tokens are sampled."""
    modules = (rejection_sampler, topk_topp_sampler)
    original = [module.apply_top_k_top_p for module in modules]
    fast = FastTopP()
    with pytest.raises(ZeroDivisionError), fast:
        assert all(module.apply_top_k_top_p is fast.masks for module in modules)
        _ = 1 / 0
    assert [module.apply_top_k_top_p for module in modules] == original
    assert fast.masks not in original
