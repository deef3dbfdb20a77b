"""Attention as at level 2: the first block, recent blocks, and blocks of the best mean keys."""

import torch
import torch.nn.functional as F


def sparse_attention(q, k, v, budget, recent, block=32, chunk=128):
    """Causal attention to `budget` keys: the first block, the recent ones, and those blocks whose
    mean key agrees best with the query before the chunk; a choice for each head and chunk."""
    b, h, t, d = q.shape
    chunks, blocks, width = t // chunk, t // block, chunk // block
    near, extra = recent // block, budget // block - recent // block - 1
    here = dict(device=q.device)
    own = torch.arange(chunks, **here) * width  # the chunk's first block
    with torch.no_grad():
        means = k.view(b, h, blocks, block, d).mean(3)
        asking = q[:, :, (own * block - 1).clamp(min=0)]
        numbers = torch.arange(blocks, **here)
        far = (numbers > 0) & (numbers < own[:, None] - near)
        scores = (asking @ means.mT).masked_fill(~far, -torch.inf)
        chosen = scores.topk(extra, -1).indices  # best first: what is not `far` comes last
        close = own[:, None] + torch.arange(-near, width, **here)
        fixed = torch.cat((torch.zeros_like(close[:, :1]), close), 1)
        index = torch.cat((fixed.clamp(min=0).expand(b, h, -1, -1), chosen), -1)
        base = torch.arange(b * h, **here).view(b, h, 1, 1) * blocks
        rows = (index + base).transpose(1, 2)
        used = torch.cat(
            (close[:, :1] > 0, close >= 0, torch.arange(extra, **here) < far.sum(-1, keepdim=True)),
            1,
        )
        place = (
            torch.cat((fixed, fixed.new_zeros(chunks, extra)), 1)[..., None] * block
            + torch.arange(block, **here)
        ).flatten(1)
        seen = place[:, None] <= (torch.arange(t, **here).view(chunks, chunk, 1))
        seen = (seen & used.repeat_interleave(block, 1)[:, None])[:, None].repeat(b, 1, 1, 1)

    def pick(x):
        return F.embedding(rows, x.reshape(-1, block * d)).view(b * chunks, h, -1, d)

    q = q.reshape(b, h, chunks, chunk, d).transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(q, pick(k), pick(v), attn_mask=seen)
    return out.view(b, chunks, h, chunk, d).transpose(1, 2).reshape(b, h, t, d)
