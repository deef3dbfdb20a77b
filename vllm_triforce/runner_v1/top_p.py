"""vLLM's top-k and top-p masks on a CPU, without sorting the vocabulary where that can be spared.

vLLM sorts every row (vllm/v1/sample/ops/topk_topp_sampler.py), which takes longer than a small
model's pass: a fifth of a plain step of four short requests, and speculation masks a row for each
draft token. What top-p keeps are mostly a few dozen tokens, and finding those is faster; where it
keeps more than the candidates, looking for them is lost time on top of the sort, so that
``TopPMasks`` soon leaves it.

Top-p on a CPU, for Model Runner V1's samplers, without sorting the vocabulary.
"""

from functools import cache

import numpy as np
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding

# Before anybody exchanges it.
_vllm_masks = topk_topp_sampler.apply_top_k_top_p

# Most tokens of a row that are looked at one by one; a larger top-k is left to vLLM.
MOST_CANDIDATES = 1024
# Fewer logits are sorted faster than anything else is done with them.
_WORTH_IT = 4096
# Sums of probabilities in float32 are off by 2e-6 at most (vocabularies of 4,096 to 262,144 tokens,
# flat to peaked: tests/unit/test_top_p.py); a sum closer to p than this could be rounded to either
# side.
ROUNDING = 1e-5
# Calls that vLLM's function gets, at most, before the candidates are looked at again.
_LONGEST_REST = 64


class TopPMasks:
    """``apply_top_k_top_p``, or vLLM's function while most rows would be left to it anyway."""

    def __init__(self) -> None:
        _keep_rows()  # compiles it, before a request waits for that
        self._left = 0
        self._rest = 1

    def __call__(self, logits, k, p, **options) -> torch.Tensor:
        if self._left:
            self._left -= 1
            return _vllm_masks(logits, k, p, **options)
        masked, num_sorted = _masked(logits, k, p, **options)
        if 2 * num_sorted > len(logits):
            self._left = self._rest = min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest = 1
        return masked


def apply_top_k_top_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size], may be changed in place
    k: torch.Tensor | None,  # [num_tokens], int; vocab_size for no limit
    p: torch.Tensor | None,  # [num_tokens], float32
    **options,
) -> torch.Tensor:  # [num_tokens, vocab_size]
    """Keeps exactly the tokens that vLLM's function keeps; the others become -infinity.

    Rows of which the candidates do not tell are left to vLLM's function: where top-p keeps more
    than there are, where a sum is so close to p that rounding decides, and where the last token
    kept and the first one dropped are equally likely, so that vLLM's sort decides.

    Args:
        options: what newer versions of vLLM pass besides, for its function.
    """
    return _masked(logits, k, p, **options)[0]


def _masked(logits, k, p, **options) -> tuple[torch.Tensor, int]:
    """And how many rows were looked at in vain."""
    is_fit = p is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not is_fit or logits.numel() < _WORTH_IT:
        return _vllm_masks(logits, k, p, **options), 0
    masked, is_sure = _among_candidates(logits, k, p)
    rest = np.flatnonzero(~is_sure)
    if len(rest):
        rows = torch.from_numpy(rest)
        its_k = None if k is None else k[rows]
        masked[rows] = _vllm_masks(logits[rows], its_k, p[rows], **options)
    return masked, len(rest)


def _among_candidates(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    k: torch.Tensor | None,  # [num_tokens]
    p: torch.Tensor,  # [num_tokens]
) -> tuple[torch.Tensor, np.ndarray]:
    """The masked logits, and of which rows they are vLLM's for certain, [num_tokens], bool."""
    logits = logits.contiguous()
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    totals = weights.sum(-1)
    if k is not None:
        totals = _limit(weights, logits, k, totals)
    masked = torch.empty_like(logits)
    is_sure = np.empty(len(logits), dtype=np.bool_)
    arrays = (tensor.numpy() for tensor in (logits, weights, totals, p.contiguous()))
    _keep_rows()(*arrays, ROUNDING, masked.numpy(), is_sure)
    return masked, is_sure


@cache
def _keep_rows():
    """``keep_rows()``: compiled at the first call, which other devices than the CPU never make."""
    # numba, once imported, keeps vLLM from starting another engine in this process.
    fix_kernel_rebinding()
    from vllm_triforce.runner_v1.top_p_rows import keep_rows

    return keep_rows


def _limit(weights, logits, k, totals: torch.Tensor) -> torch.Tensor:
    """Top-k: removes the other tokens' weights and sums up again; NaN where k is too large."""
    is_limited = k < logits.shape[-1]
    largest_k = int(torch.where(is_limited, k, 0).max())
    if largest_k == 0:
        return totals
    values = logits.topk(min(largest_k, MOST_CANDIDATES), dim=-1).values
    smallest = values.gather(1, (k.clamp(max=values.shape[-1]).long() - 1)[:, None])
    # A token that is as likely as the smallest one is kept too.
    weights.masked_fill_(is_limited[:, None] & (logits < smallest), 0.0)
    totals = torch.where(is_limited, weights.sum(-1), totals)
    return totals.masked_fill(is_limited & (k > MOST_CANDIDATES), torch.nan)


# Those that have the function by this name: the plain sampler's and the rejection sampler's.
_MODULES = (rejection_sampler, topk_topp_sampler)


class FastTopP:
    """While it is entered, vLLM's samplers mask by a function that keeps the same tokens."""

    def __init__(self) -> None:
        self.masks = TopPMasks()
        self._originals: list = []

    def __enter__(self) -> None:
        self._originals = [swaps.TOP_K_TOP_P.set(module, self.masks) for module in _MODULES]

    def __exit__(self, *exception) -> None:
        for module, original in zip(_MODULES, self._originals):
            swaps.TOP_K_TOP_P.set(module, original)
