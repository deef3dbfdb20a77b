"""Training one of the two, paced by the clock."""

import time

import torch
from torch import nn

from .model import SIZES, Llama
from .muon import Muon
from .state import checkpoint, load_model
from .text import load_text
from .windows import Windows

# (share of the time at which it begins, rows, length, share of rows with a far repeat, share with
# jumps, (budget, recent) of the sparse pass that is to agree with the full one)
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
    """The loss on a batch; matrix products in bfloat16 where that is fast."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        if teacher is None:
            return model.loss(tokens, positions, sparse)
        with torch.no_grad():
            said = teacher(tokens[:, :-1], positions).flatten(0, 1).float()
        return model.distil(tokens, positions, said)


def backward(model, teacher, tokens, positions, sparse, micro_tokens=None):
    """Adds the gradients of the loss on a batch, and returns its two parts for a reader. Rows go
    through in parts of at most `micro_tokens` (one row at least): every loss is a mean over tokens,
    so a part counts by its share of the rows."""
    rows, length = positions.shape
    part = max(1, micro_tokens // length) if micro_tokens else rows
    shown = 0
    for some, places in zip(tokens.split(part), positions.split(part)):
        loss, its = one_loss(model, teacher, some, places, sparse)
        (loss * (len(some) / rows)).backward()
        shown = shown + its * (len(some) / rows)
    return shown


def train(name, args):
    """Train one of the two until its minutes are over. The draft learns from text for the first
    quarter of the time, then from what the target says about the same windows."""
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
    begun, saved, shown = time.time(), time.time(), time.time()
    print(
        f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(stream) / 1e6:.2f} M tokens to train on, {len(held) / 1e6:.2f} M held out"
    )
    losses = []
    while True:
        share = (done + (time.time() - begun) / 60) / args.minutes
        if share >= 1:
            break
        _, rows, length, repeat, skip, sparse = [s for s in STAGES[name] if s[0] <= share][-1]
        heat = min(1, (step + 1) / 100, 0.02 + (1 - share) / (1 - args.decay_from))
        for opt, lr in zip(optimizers, (args.lr, args.lr / 5)):
            opt.param_groups[0]["lr"] = lr * heat
        rows *= args.rows_factor
        tokens = windows.batch(rows, length, repeat)
        positions = windows.positions(rows, length, model.shape.positions, skip)
        wise = teacher if share > 0.25 else None
        shown_loss = backward(model, wise, tokens, positions, sparse, args.micro_tokens)
        nn.utils.clip_grad_norm_(others, 1.0)
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        step += 1
        tokens_seen[length] = tokens_seen.get(length, 0) + rows * length
        losses.append(shown_loss)
        if time.time() - shown > 20:
            loss, astray = torch.stack(losses).mean(0).tolist()
            print(
                f"step {step} share {share:.3f} length {length} lr x{heat:.2f} tokens "
                f"{sum(tokens_seen.values()) / 1e6:.2f} M loss {loss:.3f} astray {astray:.3f}",
                flush=True,
            )
            shown, losses = time.time(), []
        if time.time() - saved > 60:
            checkpoint(
                path, model, optimizers, done + (time.time() - begun) / 60, step, tokens_seen
            )
            saved = time.time()
    checkpoint(path, model, optimizers, args.minutes, step, tokens_seen)
