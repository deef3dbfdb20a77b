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
        """Kind of round: "greedy", "sampled" by temperatures alone, or "any" parameters."""
        if self.has_processors or (self.has_masks and not self.all_greedy):
            return "any"
        return "greedy" if self.all_greedy else "sampled"


# Sampling of the captured rounds, one of each kind. In "any", masks and processors that a row does
# not use leave its logits unchanged; more kinds take memory and start-up time.
CAPTURED_SAMPLING = (
    SamplingV2(True),
    SamplingV2(False),
    SamplingV2(False, has_masks=True, has_processors=True),
)


def row_masks(sampling: SamplingV2, rows: Rows, times: int = 1) -> list[torch.Tensor]:
    """Return the rows' arguments of ``masked_logits``, each row repeated ``times`` times."""
    masks = [rows.top_k, rows.top_p, rows.min_p] if sampling.has_masks else []
    values = [column[: rows.num_rows] for column in (rows.divisor, *masks)]
    return values if times == 1 else [column.repeat_interleave(times) for column in values]


def masked_logits(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    divisor: torch.Tensor,  # [num_tokens], the temperature, 1 where that is 0
    top_k: torch.Tensor | None = None,  # [num_tokens], as the two below
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask logits by top-k, top-p and min-p, without applying the temperature.

    Runner V2's rejection sampler expects a draft's logits in this form: it only divides them by the
    temperature.

    Returns:
        Logits with -inf for masked tokens, [num_tokens, vocab_size] in the dtype of ``logits``, and
        logsumexp(logits / temperature), [num_tokens], float32. Both are contiguous.
    """
    scaled = logits.float() / divisor[:, None]
    if min_p is None and top_k is None and top_p is None:
        # Logits of a padded vocabulary are a view of longer rows; kernels need contiguous rows.
        return logits.contiguous(), scaled.logsumexp(-1)
    if min_p is not None:  # 0 masks nothing
        floor = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if top_k is not None or top_p is not None:
        scaled = apply_top_k_top_p(scaled, top_k, top_p)
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
