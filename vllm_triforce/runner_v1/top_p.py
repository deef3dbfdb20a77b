"""vLLM's top-k and top-p masks on a CPU, without a sort of the vocabulary for most rows.

vLLM sorts every row (vllm/v1/sample/ops/topk_topp_sampler.py). On a CPU that takes longer than a
small model's pass: a fifth of a plain step of four short requests. Speculation masks one row per
draft token. Top-p mostly keeps a few dozen tokens, which ``top_p_rows.py`` finds faster among the
likeliest candidates. Rows that need more candidates are sorted by vLLM after all.
"""

from functools import cache

import numpy as np
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding

# vLLM's function, before FastTopP replaces it.
vllm_masks = topk_topp_sampler.apply_top_k_top_p

# Maximum number of candidates per row. A larger top-k is left to vLLM.
MAX_CANDIDATES = 1024
# Below this number of logits a sort is fastest.
_MIN_LOGITS = 4096
# Sums of probabilities in float32 are off by at most 2e-6 (vocabularies of 4,096 to 262,144 tokens,
# flat to peaked: tests/unit/test_top_p.py). A sum closer to p than this may round to either side.
ROUNDING = 1e-5
# Maximum number of calls in a row that go to vLLM's function without a look at candidates.
_MAX_SKIPPED_CALLS = 64

# Modules with vLLM's function: the plain sampler's and the rejection sampler's.
_MODULES = (rejection_sampler, topk_topp_sampler)


class FastTopP:
    """Context manager that replaces the mask function in vLLM's samplers by ``TopPMasks``."""

    def __init__(self) -> None:
        self.masks = TopPMasks()
        self._originals: list = []

    def __enter__(self) -> None:
        self._originals = [swaps.TOP_K_TOP_P.set(module, self.masks) for module in _MODULES]

    def __exit__(self, *exception) -> None:
        for module, original in zip(_MODULES, self._originals):
            swaps.TOP_K_TOP_P.set(module, original)


class TopPMasks:
    """``apply_top_k_top_p()``, or vLLM's function while most rows would need a sort anyway."""

    def __init__(self) -> None:
        _keep_rows()  # compile before the first request
        self._skipped_calls_left = 0
        self._num_skipped_calls = 1

    def __call__(self, logits, k, p, **options) -> torch.Tensor:
        if self._skipped_calls_left:
            self._skipped_calls_left -= 1
            return vllm_masks(logits, k, p, **options)
        masked, num_sorted = _apply_masks(logits, k, p, **options)
        if 2 * num_sorted > len(logits):
            # The search was mostly wasted: skip it for a while, longer each time.
            self._num_skipped_calls = min(2 * self._num_skipped_calls, _MAX_SKIPPED_CALLS)
            self._skipped_calls_left = self._num_skipped_calls
        else:
            self._num_skipped_calls = 1
        return masked


def apply_top_k_top_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size], may be changed in place
    k: torch.Tensor | None,  # [num_tokens], int; vocab_size for no limit
    p: torch.Tensor | None,  # [num_tokens], float32
    **options,
) -> torch.Tensor:  # [num_tokens, vocab_size]
    """Set the logits to -infinity that vLLM's function sets to -infinity, and no others.

    Rows are left to vLLM's function where the candidates do not decide: top-p keeps more tokens
    than there are candidates, a sum is so close to p that rounding decides, or the last kept and
    the first dropped token are equally likely.

    Args:
        options: further arguments of newer vLLM versions, for vLLM's function.
    """
    return _apply_masks(logits, k, p, **options)[0]


def _apply_masks(logits, k, p, **options) -> tuple[torch.Tensor, int]:
    """Return the masked logits and the number of rows that needed vLLM's sort."""
    is_supported = p is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not is_supported or logits.numel() < _MIN_LOGITS:
        return vllm_masks(logits, k, p, **options), 0
    masked, is_sure = among_candidates(logits, k, p)
    unsure_rows = np.flatnonzero(~is_sure)
    if len(unsure_rows):
        rows = torch.from_numpy(unsure_rows)
        row_k = None if k is None else k[rows]
        masked[rows] = vllm_masks(logits[rows], row_k, p[rows], **options)
    return masked, len(unsure_rows)


def among_candidates(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    k: torch.Tensor | None,  # [num_tokens]
    p: torch.Tensor,  # [num_tokens]
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the masked logits and which rows equal vLLM's for certain, [num_tokens], bool."""
    logits = logits.contiguous()
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    totals = weights.sum(-1)
    if k is not None:
        totals = _apply_top_k(weights, logits, k, totals)
    masked = torch.empty_like(logits)
    is_sure = np.empty(len(logits), dtype=np.bool_)
    arrays = (tensor.numpy() for tensor in (logits, weights, totals, p.contiguous()))
    _keep_rows()(*arrays, ROUNDING, MAX_CANDIDATES, masked.numpy(), is_sure)
    return masked, is_sure


@cache
def _keep_rows():
    """Import ``keep_rows()``, which compiles it. Engines on other devices never do."""
    # Once numba is imported, vLLM cannot start another engine in this process without the fix.
    fix_kernel_rebinding()
    from vllm_triforce.runner_v1.top_p_rows import keep_rows

    return keep_rows


def _apply_top_k(weights, logits, k, totals: torch.Tensor) -> torch.Tensor:
    """Zero the weights outside top-k, in place, and return the new totals.

    The total is NaN for rows whose k exceeds ``MAX_CANDIDATES``.
    """
    is_limited = k < logits.shape[-1]
    largest_k = int(torch.where(is_limited, k, 0).max())
    if largest_k == 0:
        return totals
    values = logits.topk(min(largest_k, MAX_CANDIDATES), dim=-1).values
    smallest = values.gather(1, (k.clamp(max=values.shape[-1]).long() - 1)[:, None])
    # Like vLLM, keep tokens that are as likely as the smallest one.
    weights.masked_fill_(is_limited[:, None] & (logits < smallest), 0.0)
    totals = torch.where(is_limited, weights.sum(-1), totals)
    return totals.masked_fill(is_limited & (k > MAX_CANDIDATES), torch.nan)
