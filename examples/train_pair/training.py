"""Training of the target or the draft, paced by the clock, and evaluation of the pair."""

import itertools
import time

import torch
import torch.nn.functional as F
from torch import nn

from .model import SIZES, Llama, checkpoint, load_model
from .text import BOS, Windows, load_text

# (begin as a share of the time, rows, length, share of rows with a repeated span, share of rows
# with jumps, (budget, recent) of the sparse pass whose divergence is part of the loss)
STAGES = {
    "target": [
        (0.0, 8, 512, 0.10, 0.0, None),
        (0.52, 3, 2048, 0.05, 0.2, (256, 64)),
        (0.62, 1, 4096, 0.05, 0.2, (256, 64)),
        (0.85, 1, 8192, 0.05, 0.3, (512, 128)),
    ],
    "draft": [(0.0, 8, 512, 0.05, 0.0, None), (0.7, 8, 1024, 0.0, 0.0, None)],
}


def one_loss(model, teacher, tokens, positions, sparse):
    """Return the loss of a batch, with matrix products in bfloat16 on a GPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        if teacher is None:
            return model.loss(tokens, positions, sparse)
        with torch.no_grad():
            logits = teacher(tokens[:, :-1], positions).flatten(0, 1).float()
        return model.distil(tokens, positions, logits)


def backward(model, teacher, tokens, positions, sparse, micro_tokens=None):
    """Add the gradients of a batch's loss, and return the parts of the loss for the log.

    The batch is split into micro-batches of at most `micro_tokens` tokens, and at least one row.
    A loss is a mean over tokens, so a micro-batch counts by its share of the rows.
    """
    rows, length = positions.shape
    micro_rows = max(1, micro_tokens // length) if micro_tokens else rows
    logged = 0
    for micro, micro_positions in zip(tokens.split(micro_rows), positions.split(micro_rows)):
        loss, parts = one_loss(model, teacher, micro, micro_positions, sparse)
        (loss * (len(micro) / rows)).backward()
        logged = logged + parts * (len(micro) / rows)
    return logged


def train(name, args):
    """Train the target or the draft for `args.minutes`.

    The draft learns from text for the first quarter of the time, then from the target's
    distributions over the same windows.
    """
    stream, held = load_text(args.work, args.more_text)
    model, path = Llama(SIZES[args.size][name]).to(args.device), args.work / f"{name}.pt"
    matrices = [p for p in model.parameters() if p.ndim == 3]
    others = [p for p in model.parameters() if p.ndim < 3]
    optimizers = [
        Muon(matrices, lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr / 5, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    done, step, tokens_seen = 0.0, 0, {}
    if args.resume and path.exists():
        state = torch.load(path, map_location=args.device)
        model.load_state_dict(state["model"])
        for opt, s in zip(optimizers, state["optimizers"]):
            opt.load_state_dict(s)
        done, step, tokens_seen = state["done"], state["step"], state["tokens"]
    windows = Windows(stream, step, args.device)
    teacher = load_model(args.work, "target", args.device) if name == "draft" else None
    begin, saved, logged = time.time(), time.time(), time.time()
    print(
        f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(stream) / 1e6:.2f} M tokens to train on, {len(held) / 1e6:.2f} M held out"
    )
    losses = []
    while True:
        share = (done + (time.time() - begin) / 60) / args.minutes
        if share >= 1:
            break
        _, rows, length, repeat, skip, sparse = [s for s in STAGES[name] if s[0] <= share][-1]
        lr_factor = min(1, (step + 1) / 100, 0.02 + (1 - share) / (1 - args.decay_from))
        for opt, lr in zip(optimizers, (args.lr, args.lr / 5)):
            opt.param_groups[0]["lr"] = lr * lr_factor
        rows *= args.rows_factor
        tokens = windows.batch(rows, length, repeat)
        positions = windows.positions(rows, length, model.shape.positions, skip)
        now_teacher = teacher if share > 0.25 else None
        parts = backward(model, now_teacher, tokens, positions, sparse, args.micro_tokens)
        nn.utils.clip_grad_norm_(others, 1.0)
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        step += 1
        tokens_seen[length] = tokens_seen.get(length, 0) + rows * length
        losses.append(parts)
        if time.time() - logged > 20:
            loss, divergence = torch.stack(losses).mean(0).tolist()
            print(
                f"step {step} share {share:.3f} length {length} lr x{lr_factor:.2f} tokens "
                f"{sum(tokens_seen.values()) / 1e6:.2f} M loss {loss:.3f} "
                f"divergence {divergence:.3f}",
                flush=True,
            )
            logged, losses = time.time(), []
        if time.time() - saved > 60:
            checkpoint(
                path, model, optimizers, done + (time.time() - begin) / 60, step, tokens_seen
            )
            saved = time.time()
    checkpoint(path, model, optimizers, args.minutes, step, tokens_seen)


class Muon(torch.optim.Optimizer):
    """Momentum with updates orthogonalised by Newton-Schulz, for matrices and stacks of them."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape[-2:], []).append(p)
            for (rows, cols), params in by_shape.items():
                update = []
                for p in params:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    update.append(p.grad.lerp(m, group["momentum"]).view(-1, rows, cols))
                x = torch.cat(update)
                x = x.mT if rows > cols else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(5):
                    y = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
                x = (x.mT if rows > cols else x) * max(1, rows / cols) ** 0.5
                for p, u in zip(params, x.split([len(u) for u in update])):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(u.view_as(p), alpha=group["lr"])


@torch.no_grad()
def evaluate(work, length=16384, rows=4):
    """Print held-out loss by depth of context, and agreement of the draft with the target."""
    held = load_text(work)[1]
    target, draft = load_model(work, "target"), None
    edges = [0, 512, 2048, 4096, 8192, length]
    losses, agreed = [], []
    if (work / "draft.pt").exists():
        draft = load_model(work, "draft")
    for i in range(rows):
        start = i * (len(held) - length - 1) // max(1, rows - 1)
        tokens = held[None, start : start + length + 1].clone()
        tokens[:, 0] = BOS
        logits = target(tokens[:, :-1], torch.arange(length)[None])[0]
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none"))
        if draft is not None:  # as at level 1: the sink and 256 to 511 recent tokens
            cut = F.pad(tokens[0, 1:].unfold(0, 511, 256), (1, 0), value=BOS)
            guess = draft(cut, torch.arange(512).repeat(len(cut), 1))[:, 256:].argmax(-1)
            agreed.append((guess.flatten() == logits.argmax(-1)[256:]).float().mean())
    losses = torch.stack(losses).mean(0)
    for a, b in itertools.pairwise(edges):
        print(f"held-out loss at depth {a:>6} to {b:>6}: {losses[a:b].mean():.3f}")
    print(f"held-out loss, all of {length}: {losses.mean():.3f} nats a token")
    if agreed:
        print(f"draft's greedy token is the target's: {torch.stack(agreed).mean():.3f}")
