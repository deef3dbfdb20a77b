"""Sampling parameters of a proposal's rows, and their masks on logits."""

from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_triforce.kernels.rows import Rows


@dataclass(frozen=True)
class SamplingV2:
    """Kinds of sampling in a batch, known to the host; each row's parameters are in ``Rows``."""

    all_greedy: bool
    has_masks: bool = False
    """True if a row has top-k, top-p or min-p; False if all are greedy."""
    has_processors: bool = False
    """True if a row has logits processors (``LogitsProcessing``)."""

    @property
    def kind(self) -> str:
        """Kind of round: "greedy", or "any" for all sampling parameters."""
        return "greedy" if self.all_greedy and not self.has_processors else "any"


# Sampling of the captured rounds, one of each kind. Masks and processors that a row does not use
# leave its logits unchanged and take a few microseconds; more kinds take memory and start-up time.
CAPTURED_SAMPLING = (SamplingV2(True), SamplingV2(False, has_masks=True, has_processors=True))


class Masks:
    """Sampling parameters of the rows for ``masked_logits``, each row repeated ``times`` times."""

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
    """Mask logits by top-k, top-p and min-p, without applying the temperature.

    Runner V2's rejection sampler expects a draft's logits in this form: it only divides them by the
    temperature.

    Args:
        sampling: ``divisor`` is the temperature, 1 where that is 0.

    Returns:
        Logits with -inf for masked tokens, [num_tokens, vocab_size] in the dtype of ``logits``, and
        logsumexp(logits / temperature), [num_tokens], float32. Both are contiguous.
    """
    scaled = logits.float() / sampling.divisor[:, None]
    if sampling.min_p is None and sampling.top_k is None and sampling.top_p is None:
        # Logits of a padded vocabulary are a view of longer rows; kernels need contiguous rows.
        return logits.contiguous(), scaled.logsumexp(-1)
    if sampling.min_p is not None:  # 0 masks nothing
        floor = scaled.amax(-1, keepdim=True) + sampling.min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled = apply_top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    masked = logits.masked_fill(scaled == float("-inf"), float("-inf"))
    return masked, scaled.logsumexp(-1)


def kernel_scratch() -> list[torch.Tensor]:
    """Return the buffers that vLLM's kernels for top-k and top-p write to.

    A captured graph must keep them alive: vLLM replaces them when a larger batch needs more.
    """
    if not topk_topp_sampler.HAS_TRITON:
        return []
    from vllm.v1.sample.ops import topk_topp_triton as kernels

    buffers = (
        kernels._TRITON_BUFFER_CACHE,
        kernels._TRITON_SPLIT_CACHE,
        kernels._TRITON_TABLE_CACHE,
    )
    return [leaf for leaf in tree_leaves(buffers) if isinstance(leaf, torch.Tensor)]
