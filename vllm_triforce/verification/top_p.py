"""vLLM's top-k and top-p masks on a CPU, without sorting the vocabulary where that can be spared.

vLLM sorts every row (vllm/v1/sample/ops/topk_topp_sampler.py), which takes longer than a small
model's pass: a fifth of a plain step of four short requests, and speculation masks a row for each
draft token. What top-p keeps are mostly a few dozen tokens, and finding those is faster; where it
keeps more than the candidates, looking for them is lost time on top of the sort, so that
``TopPMasks`` soon leaves it.
"""

import torch
from vllm.v1.sample.ops import topk_topp_sampler

# Before anybody exchanges it.
_vllm_masks = topk_topp_sampler.apply_top_k_top_p

# Largest logits of a row that are looked at: at first, and where those do not tell.
NUM_CANDIDATES = (128, 1024)
# Fewer logits are sorted faster than anything else is done with them.
_WORTH_IT = 4096
# Sums of probabilities in float32 are off by 2e-6 at most (vocabularies of 4,096 to 262,144 tokens,
# flat to peaked: tests/test_top_p.py); a sum closer to p than this could be rounded to either side.
ROUNDING = 1e-5
# Calls that vLLM's function gets, at most, before the candidates are looked at again.
_LONGEST_REST = 64


class TopPMasks:
    """``apply_top_k_top_p``, or vLLM's function while most rows would be left to it anyway."""

    def __init__(self) -> None:
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
    vocab_size = logits.shape[-1]
    counts = [count for count in NUM_CANDIDATES if 16 * count < vocab_size]
    is_fit = p is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not is_fit or not counts or logits.numel() < _WORTH_IT:
        return _vllm_masks(logits, k, p, **options), 0
    masked = torch.empty_like(logits)
    rest = torch.arange(len(logits))
    for count in counts:
        if not len(rest):
            break
        rows = slice(None) if len(rest) == len(logits) else rest
        its_k = None if k is None else k[rows]
        found, is_sure = _among_candidates(logits[rows], its_k, p[rows], count)
        masked[rows] = found
        rest = rest[~is_sure]
    if len(rest):
        masked[rest] = _vllm_masks(logits[rest], None if k is None else k[rest], p[rest], **options)
    return masked, len(rest)


def _among_candidates(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    k: torch.Tensor | None,  # [num_tokens]
    p: torch.Tensor,  # [num_tokens]
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked logits, and of which rows they are vLLM's for certain, [num_tokens], bool."""
    values, token_ids = logits.topk(count, dim=-1)  # in descending order
    # log(sum(exp)), four times faster than torch's: the largest is known.
    total = values[:, 0] + (logits - values[:, :1]).exp_().sum(-1).log_()
    is_sure = torch.ones(len(logits), dtype=torch.bool)
    if k is not None:
        is_limited = k < logits.shape[-1]
        place = k.clamp(max=count).long() - 1
        smallest = values.gather(1, place[:, None])
        # A token that is as likely as the smallest one is kept too.
        is_sure &= ~is_limited | ((k < count) & (values[:, -1] < smallest[:, 0]))
        is_beyond = is_limited[:, None] & (values < smallest)
        values = values.masked_fill(is_beyond, -torch.inf)
        total = torch.where(is_limited, values.logsumexp(-1), total)
    probs = (values - total[:, None]).double().exp()
    before = probs.cumsum(-1) - probs  # of all tokens that are likelier
    wanted = p[:, None].double()
    is_kept = before < wanted
    is_kept[:, 0] = True
    is_sure &= ((before - wanted).abs() > ROUNDING).all(-1) & ~is_kept[:, -1]
    least_kept = values.masked_fill(~is_kept, torch.inf).amin(-1)
    is_sure &= least_kept > values.masked_fill(is_kept, -torch.inf).amax(-1)
    masked = torch.full_like(logits, -torch.inf)
    return masked.scatter_(1, token_ids, values.masked_fill(~is_kept, -torch.inf)), is_sure
