"""Llama model with its sizes, losses and checkpoints."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .text import VOCAB, save


@dataclass
class Shape:
    hidden: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    positions: int
    theta: float
    seed: int = 0


SIZES = {
    "small": {
        "target": Shape(256, 4, 8, 64, 704, 65536, 1e6),
        "draft": Shape(128, 2, 4, 32, 352, 2048, 1e4, seed=1),
    },
    "medium": {
        "target": Shape(768, 12, 12, 64, 2048, 131072, 1e6),
        "draft": Shape(256, 2, 4, 64, 704, 2048, 1e4, seed=1),
    },
}


class Layer(nn.Module):
    """Llama layer; matrices that share an input are stacked in one parameter."""

    def __init__(self, s):
        super().__init__()
        wide = s.heads * s.head_dim
        self.heads, self.head_dim = s.heads, s.head_dim
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(s.hidden)) for _ in range(2))
        self.qkv = nn.Parameter(torch.randn(3, wide, s.hidden) * s.hidden**-0.5)
        self.out = nn.Parameter(torch.zeros(1, s.hidden, wide))
        self.gate_up = nn.Parameter(torch.randn(2, s.inner, s.hidden) * s.hidden**-0.5)
        self.down = nn.Parameter(torch.zeros(1, s.hidden, s.inner))

    def forward(self, x, cos, sin, sparse=None):
        b, t, _ = x.shape
        h = F.rms_norm(x, x.shape[-1:], self.norm1, 1e-6)
        qkv = F.linear(h, self.qkv.flatten(0, 1)).view(b, t, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (
            y * cos
            + torch.cat((-y[..., self.head_dim // 2 :], y[..., : self.head_dim // 2]), -1) * sin
            for y in (q, k)
        )
        a = (
            sparse_attention(q, k, v, *sparse)
            if sparse
            else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        x = x + F.linear(a.transpose(1, 2).reshape(b, t, -1), self.out[0])
        h = F.rms_norm(x, x.shape[-1:], self.norm2, 1e-6)
        gate, up = F.linear(h, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down[0])


class Llama(nn.Module):
    def __init__(self, s):
        super().__init__()
        torch.manual_seed(s.seed)
        self.shape = s
        self.embed = nn.Parameter(torch.randn(VOCAB, s.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        freqs = s.theta ** -(torch.arange(0, s.head_dim, 2).double() / s.head_dim)
        self.register_buffer("freqs", freqs.repeat(2), persistent=False)

    def forward(self, ids, positions, sparse=None):
        angles = positions[:, None, :, None].double() * self.freqs
        cos, sin = angles.cos().float(), angles.sin().float()
        x = self.embed[ids]
        for layer in self.layers:
            x = layer(x, cos, sin, sparse)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6), self.embed)

    def loss(self, tokens, positions, sparse=None):
        """Return cross entropy, plus the divergence of sparse from full attention with `sparse`.

        The second value has both parts, detached, for the log.
        """
        logits = self(tokens[:, :-1], positions).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        if sparse is None:
            return loss, torch.stack((loss.detach(), loss.new_zeros(())))
        other = self(tokens[:, :-1], positions, sparse).flatten(0, 1)
        divergence = F.kl_div(
            (2 * other).log_softmax(-1),
            (2 * logits).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )  # sharpened by factor 2, since argmaxes matter
        return loss + 2 * divergence, torch.stack((loss.detach(), divergence.detach()))

    def distil(self, tokens, positions, teacher_logits):
        logits = self(tokens[:, :-1], positions).flatten(0, 1).float()
        loss = -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return loss, torch.stack((loss.detach(), loss.new_zeros(())))


def sparse_attention(q, k, v, budget, recent, block=32, chunk=128):
    """Attend causally to `budget` keys, selected for each head and chunk of queries.

    They are the first block, the recent blocks, and the blocks whose mean keys have the largest
    product with the last query before the chunk.
    """
    b, h, t, d = q.shape
    chunks, blocks, width = t // chunk, t // block, chunk // block
    near, extra = recent // block, budget // block - recent // block - 1
    on = dict(device=q.device)
    first = torch.arange(chunks, **on) * width  # first block of each chunk
    with torch.no_grad():
        means = k.view(b, h, blocks, block, d).mean(3)
        queries = q[:, :, (first * block - 1).clamp(min=0)]
        ids = torch.arange(blocks, **on)
        is_far = (ids > 0) & (ids < first[:, None] - near)
        scores = (queries @ means.mT).masked_fill(~is_far, -torch.inf)
        selected = scores.topk(extra, -1).indices  # best first, so blocks that are not far are last
        close = first[:, None] + torch.arange(-near, width, **on)
        fixed = torch.cat((torch.zeros_like(close[:, :1]), close), 1)
        index = torch.cat((fixed.clamp(min=0).expand(b, h, -1, -1), selected), -1)
        base = torch.arange(b * h, **on).view(b, h, 1, 1) * blocks
        rows = (index + base).transpose(1, 2)
        is_valid = torch.cat(
            (
                close[:, :1] > 0,
                close >= 0,
                torch.arange(extra, **on) < is_far.sum(-1, keepdim=True),
            ),
            1,
        )
        positions = (
            torch.cat((fixed, fixed.new_zeros(chunks, extra)), 1)[..., None] * block
            + torch.arange(block, **on)
        ).flatten(1)
        mask = positions[:, None] <= (torch.arange(t, **on).view(chunks, chunk, 1))
        mask = (mask & is_valid.repeat_interleave(block, 1)[:, None])[:, None].repeat(b, 1, 1, 1)

    def gather(x):
        return F.embedding(rows, x.reshape(-1, block * d)).view(b * chunks, h, -1, d)

    q = q.reshape(b, h, chunks, chunk, d).transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=mask)
    return out.view(b, chunks, h, chunk, d).transpose(1, 2).reshape(b, h, t, d)


def load_model(work, name, device="cpu"):
    state = torch.load(work / f"{name}.pt", map_location=device)
    model = Llama(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval()


def checkpoint(path, model, optimizers, done, step, tokens):
    state = dict(
        model=model.state_dict(),
        shape=asdict(model.shape),
        done=done,
        step=step,
        tokens=tokens,
        optimizers=[o.state_dict() for o in optimizers],
    )
    save(path, state)
    print("saved:", path.name, "tokens by length:", tokens, flush=True)
