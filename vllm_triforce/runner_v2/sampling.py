"""Sampling parameters of a proposal's rows, and their masks on logits."""

from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_triforce.kernels.rows import Rows


@dataclass(frozen=True)
class SamplingV2:
    """What the host knows of the rows' sampling; each row's own parameters are in ``Rows``."""

    all_greedy: bool
    has_masks: bool = False
    """Whether a row has top-k, top-p or min-p; False where all are greedy."""
    has_processors: bool = False
    """Whether a row asks anything else of its logits (``RowLogitsProcessor``)."""

    @property
    def kind(self) -> str:
        """By which rounds are captured: greedy ones, and those that do all that can be asked."""
        return "greedy" if self.all_greedy and not self.has_processors else "any"


# What is captured of each kind. What a row does not ask for leaves its logits as they are, and
# takes a few microseconds in a graph; each kind more takes its share of memory and of the start.
CAPTURED_SAMPLING = (
    SamplingV2(True),
    SamplingV2(False, has_masks=True, has_processors=True),
)


class Masks:
    """Sampling parameters of the rows, each row's ``times`` over, for ``masked_logits``."""

    def __init__(self, sampling: SamplingV2, rows: Rows, times: int = 1) -> None:
        def repeat(values):
            values = values[: rows.num_rows]
            return values if times == 1 else values.repeat_interleave(times)

        self.divisor = repeat(rows.divisor)
        self.top_k = self.top_p = self.min_p = None
        if sampling.has_masks:
            self.top_k, self.top_p, self.min_p = map(repeat, (rows.top_k, rows.top_p, rows.min_p))


def masked_logits(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    sampling,  # divisor [num_tokens], and top_k, top_p, min_p or None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before the temperature, with -inf for what the request would never draw.

    They are what Runner V2's rejection sampler wants of a draft: it divides them by the
    temperature, and nothing else. ``token_distribution`` gives the same distributions.

    Args:
        sampling: its divisor is the temperature, 1 where that is 0.

    Returns:
        [num_tokens, vocab_size] in the dtype of ``logits``, and [num_tokens], float32, the
        logarithm of the sum of exponentials of them divided by the temperature. Both are
        contiguous.
    """
    scaled = logits.float() / sampling.divisor[:, None]
    if sampling.min_p is None and sampling.top_k is None and sampling.top_p is None:
        # A padded vocabulary's logits come as a view of longer rows, and kernels count on a row's
        # length being what lies between two.
        return logits.contiguous(), scaled.logsumexp(-1)
    if sampling.min_p is not None:  # 0 masks nothing
        floor = scaled.amax(-1, keepdim=True) + sampling.min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled = apply_top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    masked = logits.masked_fill(scaled == float("-inf"), float("-inf"))
    return masked, scaled.logsumexp(-1)


def kernel_scratch() -> list[torch.Tensor]:
    """Memory that vLLM's kernels for top-k and top-p write to. Whoever captures them in a graph
    keeps it: vLLM lets go of what it has when a larger batch needs more."""
    if not topk_topp_sampler.HAS_TRITON:
        return []
    from vllm.v1.sample.ops import topk_topp_triton as kernels

    kept = (kernels._TRITON_BUFFER_CACHE, kernels._TRITON_SPLIT_CACHE, kernels._TRITON_TABLE_CACHE)
    return [its for its in tree_leaves(kept) if isinstance(its, torch.Tensor)]
