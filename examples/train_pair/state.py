"""What is kept between runs."""

import os
from dataclasses import asdict

import torch

from .model import Llama, Shape


def save(path, state):
    """In one piece: whoever ends us leaves the old or the new one."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


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
