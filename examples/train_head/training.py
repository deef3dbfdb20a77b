"""Training of the head, its acceptance on held-out text, and its checkpoint."""

import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from train_pair.training import Muon

from .head import Head, Shape
from .states import aux_layers

LENGTH, NUM_STEPS = 512, 3
# Weight of each further step's loss, as published.
DECAY = 0.8
# One sequence of so many is held out.
HELD_OUT = 16


class Target:
    """What the training needs of the target: its config, embeddings and output layer."""

    def __init__(self, name: str) -> None:
        from .states import load_target

        model = load_target(name)
        self.config = model.config
        self.embeddings = model.get_input_embeddings().weight.detach()
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.norm = model.model.norm.weight.detach()


class Crops:
    """Crops of the sequences' states, for the head's steps at ``LENGTH`` places."""

    def __init__(self, work: Path, embeddings: torch.Tensor) -> None:
        files = sorted((work / "states").glob("*.pt"))
        if len(files) < HELD_OUT:
            raise ValueError(f"{work / 'states'} has {len(files)} sequences; run 'states' first")
        self.held_out = files[HELD_OUT - 1 :: HELD_OUT]
        self.files = sorted(set(files) - set(self.held_out))
        self._embeddings = embeddings

    def starts(self, files: list[Path], rng: random.Random) -> list[tuple[Path, int]]:
        """List crops at random places, in random order: about each token once."""
        crops = []
        for file in files:
            state = torch.load(file, mmap=True)
            last = len(state["tokens"]) - LENGTH - NUM_STEPS
            if last < 0:
                continue
            first = min(state["begin"], last)
            count = max(1, round((last + LENGTH - first) / LENGTH))
            crops += [(file, rng.randint(first, last)) for _ in range(count)]
        rng.shuffle(crops)
        return crops

    def batch(self, crops: list[tuple[Path, int]]) -> tuple[torch.Tensor, ...]:
        """Load crops: ``aux``, ``embeds`` as of ``Head.forward()``, and the target's ``last``."""
        end = LENGTH + NUM_STEPS
        states = [(torch.load(file, mmap=True), start) for file, start in crops]
        aux = torch.stack([s["aux"][a : a + LENGTH].float() for s, a in states])
        last = torch.stack([s["last"][a + 1 : a + end].float() for s, a in states])
        tokens = torch.stack([s["tokens"][a + 1 : a + end].long() for s, a in states])
        return aux, self._embeddings[tokens], last

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """Count each token in the sequences that are trained on."""
        tokens = torch.cat([torch.load(file, mmap=True)["tokens"] for file in self.files])
        return torch.bincount(tokens.long(), minlength=vocab_size)


def train(
    work: Path, target_name: str, epochs: int, rows: int, lr: float, draft_vocab: int
) -> None:
    """Train for ``epochs`` passes over the sequences, from the saved state if there is one."""
    target = Target(target_name)
    crops = Crops(work, target.embeddings)
    path = work / "head.pt"
    state = torch.load(path) if path.exists() else None
    if state is None:
        counts = crops.token_counts(len(target.embeddings))
        vocab = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
        covered = float(counts[vocab].sum() / counts.sum())
        print(f"the draft vocabulary of {draft_vocab} has {covered:.4f} of the text's tokens")
    else:
        vocab = state["vocab"]
    head = Head(Shape.of(target.config, len(vocab)))
    lm_head = target.lm_head[vocab]
    if state is None:
        start_from(head, target, lm_head)
    optimizers = _optimizers(head, lr)
    step = 0
    if state is not None:
        head.load_state_dict(state["head"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step = state["step"]
    peaks = [group["lr"] for opt in _optimizers(head, lr) for group in opt.param_groups]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    per_epoch = len(crops.starts(crops.files, random.Random(0))) // rows
    num_steps = epochs * per_epoch
    print(
        f"{sum(p.numel() for p in head.parameters()) / 1e6:.1f} M parameters, step {step} of "
        f"{num_steps}, {per_epoch * rows * LENGTH:,} tokens an epoch"
    )
    begin = saved_at = time.monotonic()
    logged: list[list[float]] = []
    while step < num_steps:
        epoch, place = divmod(step, per_epoch)
        order = crops.starts(crops.files, random.Random(epoch))
        for i in range(place, per_epoch):
            share = step / num_steps
            factor = min(1.0, (step + 1) / 20, 0.03 + (1 - share) / 0.6)
            for group, peak in zip(groups, peaks):
                group["lr"] = peak * factor
            losses = _losses(head, lm_head, *crops.batch(order[i * rows : (i + 1) * rows]))
            weights = torch.tensor([DECAY**j for j in range(NUM_STEPS)])
            (torch.stack(losses) @ weights / weights.sum()).backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            logged.append([float(loss.detach()) for loss in losses])
            if step % 20 == 0:
                mean = torch.tensor(logged).mean(0).tolist()
                minutes = (time.monotonic() - begin) / 60
                text = " ".join(f"{loss:.3f}" for loss in mean)
                print(f"step {step} of {num_steps}, {minutes:.1f} min, losses {text}", flush=True)
                logged = []
            if time.monotonic() - saved_at > 60 or step == num_steps:
                _save(path, head, optimizers, step, vocab)
                saved_at = time.monotonic()
    evaluate(work, target_name)


def start_from(head: Head, target: Target, lm_head: torch.Tensor) -> None:
    """Start from the target's output layer and norm, and from its last state alone."""
    hidden = target.config.hidden_size
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head)
        head.norm.weight.copy_(target.norm)
        head.fc.weight.normal_(std=0.02 / hidden**0.5)
        head.fc.weight[:, 2 * hidden :] += torch.eye(hidden)


def _optimizers(head: Head, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layer, AdamW for norms and the output layer."""
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    others = [p for n, p in head.named_parameters() if p.ndim == 1 or "lm_head" in n]
    return [
        Muon(matrices, lr=lr),  # PyTorch's works in bfloat16, which takes minutes on a CPU
        torch.optim.AdamW(others, lr=lr / 20, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _losses(head, lm_head, aux, embeds, last) -> list[torch.Tensor]:
    """Return each step's cross entropy, less the target's entropy: 0 would be the target."""
    losses = []
    for step, logits in enumerate(head(aux, embeds, NUM_STEPS)):
        wanted = (last[:, step : step + LENGTH] @ lm_head.T).log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
        losses.append(divergence / logits[..., 0].numel())
    return losses


def _save(path: Path, head: Head, optimizers, step: int, vocab: torch.Tensor) -> None:
    state = {
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "vocab": vocab,
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _load(work: Path, target: Target) -> tuple[Head, torch.Tensor]:
    state = torch.load(work / "head.pt")
    head = Head(Shape.of(target.config, len(state["vocab"])))
    head.load_state_dict(state["head"])
    return head.eval(), state["vocab"]


@torch.inference_mode()
def evaluate(work: Path, target_name: str) -> None:
    """Print, by drafted token, the acceptance where the tokens before it are those of the text.

    At T=1 a token is accepted with the sum of min(p, q) over the vocabulary; at T=0 where the
    head's best token is the target's.
    """
    target = Target(target_name)
    head, vocab = _load(work, target)
    crops = Crops(work, target.embeddings)
    sums, count = torch.zeros(2, NUM_STEPS, dtype=torch.float64), 0
    for crop in crops.starts(crops.held_out, random.Random(0)):
        aux, embeds, last = crops.batch([crop])
        for step, logits in enumerate(head(aux, embeds, NUM_STEPS)):
            target_logits = last[0, step : step + LENGTH] @ target.lm_head.T
            q, p = logits[0].softmax(-1), target_logits.softmax(-1)
            sums[0, step] += (vocab[q.argmax(-1)] == p.argmax(-1)).sum()
            sums[1, step] += torch.minimum(p[:, vocab], q).sum()
        count += LENGTH
    for temperature, row in enumerate(sums / count):
        text = " ".join(f"{share:.3f}" for share in row.tolist())
        print(f"T={temperature}: accepted, by token: {text} ({count:,} places held out)")


def export(work: Path, target_name: str, out: Path) -> None:
    """Write the head as a ``LlamaForCausalLMEagle3`` checkpoint in bfloat16."""
    from safetensors.torch import save_file

    target = Target(target_name)
    head, vocab = _load(work, target)
    weights = {n: p.bfloat16().contiguous() for n, p in head.state_dict().items()}
    # vLLM adds these offsets to the ids of the draft vocabulary.
    weights["d2t"] = vocab - torch.arange(len(vocab))
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors")
    shape, config = head.midlayer.shape, target.config
    (out / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "dtype": "bfloat16",
                "vocab_size": config.vocab_size,
                "draft_vocab_size": len(vocab),
                "hidden_size": shape.hidden,
                "intermediate_size": shape.inner,
                "num_hidden_layers": 1,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": shape.eps,
                "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
                "max_position_embeddings": config.max_position_embeddings,
                "tie_word_embeddings": False,
                "eagle_aux_hidden_state_layer_ids": aux_layers(config.num_hidden_layers),
            },
            indent=2,
        )
        + "\n"
    )
    print(f"{out}: {sum(w.nbytes for w in weights.values()) / 1e6:.1f} MB")
