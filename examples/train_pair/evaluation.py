"""How good the pair is on the text that is held out."""

import itertools

import torch
import torch.nn.functional as F

from .state import load_model
from .text import load_text
from .tokenizer import BOS


@torch.no_grad()
def evaluate(work, length=16384, rows=4):
    """Held-out loss by depth of context, and how often the draft's next token is the target's."""
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
