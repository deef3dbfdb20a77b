"""Training of the head, its acceptance on held-out text, and its checkpoint."""

import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from train_pair.training import Muon

from .corpus import sequences
from .head import Head, Shape
from .states import aux_layers, compute_states, load_target, read_states

LENGTH, NUM_STEPS = 512, 3
# Weight of each further step's loss, as published.
DECAY = 0.8
# One sequence of so many is held out; a prime, so that all kinds are.
HELD_OUT = 17


class Target:
    """What the training needs of the target: its config, embeddings and output layer."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.model = load_target(name, device)
        self.config = self.model.config
        self.embeddings = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.get_output_embeddings().weight.detach()
        self.norm = self.model.model.norm.weight.detach()


class Crops:
    """Crops of the sequences' states, for the head's steps at ``LENGTH`` places.

    The states are those that the step ``states`` wrote. Where it did not run, they are computed,
    and held on the target's device.
    """

    def __init__(self, work: Path, target: Target) -> None:
        self._embeddings = target.embeddings
        rows = read_states(work) or list(compute_states(target.model, sequences(work)))
        if len(rows) < HELD_OUT:
            raise ValueError(f"{work} has {len(rows)} sequences, {HELD_OUT} are needed")
        self.held_out = rows[HELD_OUT - 1 :: HELD_OUT]
        self.trained = [row for i, row in enumerate(rows) if i % HELD_OUT != HELD_OUT - 1]

    def starts(self, rows: list[dict], rng: random.Random) -> list[tuple[dict, int]]:
        """List crops at random places, in random order: about each token once."""
        crops = []
        for row in rows:
            last = len(row["tokens"]) - LENGTH - NUM_STEPS
            if last < 0:
                continue
            first = min(row["begin"], last)
            count = max(1, round((last + LENGTH - first) / LENGTH))
            crops += [(row, rng.randint(first, last)) for _ in range(count)]
        rng.shuffle(crops)
        return crops

    def batch(self, crops: list[tuple[dict, int]]) -> tuple[torch.Tensor, ...]:
        """Load crops: ``aux``, ``embeds`` as of ``Head.forward()``, and the target's ``last``."""
        end, device = LENGTH + NUM_STEPS, self._embeddings.device
        aux = torch.stack([row["aux"][a : a + LENGTH] for row, a in crops])
        last = torch.stack([row["last"][a + 1 : a + end] for row, a in crops])
        tokens = torch.stack([row["tokens"][a + 1 : a + end] for row, a in crops])
        embeds = self._embeddings[tokens.to(device).long()]
        return aux.to(device).float(), embeds, last.to(device).float()

    def token_counts(self) -> torch.Tensor:
        """Count each token in the sequences that are trained on."""
        tokens = torch.cat([row["tokens"] for row in self.trained]).cpu()
        return torch.bincount(tokens.long(), minlength=len(self._embeddings))


def train(
    work: Path, target: Target, epochs: int, minutes: float, rows: int, lr: float, draft_vocab: int
) -> None:
    """Train for ``epochs`` passes over the sequences, from the saved state if there is one.

    ``minutes`` ends it earlier; the learning rate falls towards whichever end comes first.
    """
    crops = Crops(work, target)
    path, device = work / "head.pt", target.embeddings.device
    state = torch.load(path, map_location=device) if path.exists() else None
    if state is None:
        counts = crops.token_counts()
        vocab = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
        covered = float(counts[vocab].sum() / counts.sum())
        print(f"the draft vocabulary of {draft_vocab} has {covered:.4f} of the text's tokens")
        vocab = vocab.to(device)
    else:
        vocab = state["vocab"]
    head = Head(Shape.of(target.config, len(vocab))).to(device)
    lm_head = target.lm_head[vocab]
    if state is None:
        start_from(head, target, lm_head)
    optimizers = _optimizers(head, lr)
    step, spent = 0, 0.0
    if state is not None:
        head.load_state_dict(state["head"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step, spent = state["step"], state.get("seconds", 0.0)
    peaks = [group["lr"] for opt in _optimizers(head, lr) for group in opt.param_groups]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    per_epoch = len(crops.starts(crops.trained, random.Random(0))) // rows
    if not per_epoch:
        raise ValueError(f"{work} has text for less than a batch of {rows} crops; lower --rows")
    num_steps = epochs * per_epoch
    print(
        f"{sum(p.numel() for p in head.parameters()) / 1e6:.1f} M parameters, step {step} of "
        f"{num_steps}, {per_epoch * rows * LENGTH:,} tokens an epoch"
    )
    weights = torch.tensor([DECAY**j for j in range(NUM_STEPS)], device=device)
    begin = saved_at = time.monotonic() - spent
    logged: list[torch.Tensor] = []
    order: list[tuple[dict, int]] = []
    while True:
        seconds = time.monotonic() - begin
        share = max(step / num_steps, seconds / 60 / minutes)
        if seconds - saved_at + begin > 60 or share >= 1:
            _save(path, head, optimizers, step, seconds, vocab)
            saved_at = begin + seconds
        if share >= 1:
            break
        epoch, place = divmod(step, per_epoch)
        if not order or place == 0:
            order = crops.starts(crops.trained, random.Random(epoch))
        factor = min(1.0, (step + 1) / 20, 0.03 + (1 - share) / 0.6)
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * factor
        losses = _losses(head, lm_head, *crops.batch(order[place * rows : (place + 1) * rows]))
        (losses @ weights / weights.sum()).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        logged.append(losses.detach())
        if step % 20 == 0:
            text = " ".join(f"{loss:.3f}" for loss in torch.stack(logged).mean(0).tolist())
            print(f"step {step} of {num_steps}, {seconds / 60:.1f} min, losses {text}", flush=True)
            logged = []
    evaluate(work, target, crops)


def start_from(head: Head, target: Target, lm_head: torch.Tensor) -> None:
    """Start from the target's output layer and norm, and from its last state alone."""
    hidden = target.config.hidden_size
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head)
        head.norm.weight.copy_(target.norm)
        head.fc.weight.normal_(std=0.02 / hidden**0.5)
        head.fc.weight[:, 2 * hidden :] += torch.eye(hidden, device=lm_head.device)


def _optimizers(head: Head, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layer, AdamW for norms and the output layer."""
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    others = [p for n, p in head.named_parameters() if p.ndim == 1 or "lm_head" in n]
    return [
        Muon(matrices, lr=lr),  # PyTorch's works in bfloat16, which takes minutes on a CPU
        torch.optim.AdamW(others, lr=lr / 20, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _losses(head, lm_head, aux, embeds, last) -> torch.Tensor:
    """Return each step's cross entropy, less the target's entropy: 0 would be the target."""
    losses = []
    for step, logits in enumerate(head(aux, embeds, NUM_STEPS)):
        wanted = (last[:, step : step + LENGTH] @ lm_head.T).log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
        losses.append(divergence / logits[..., 0].numel())
    return torch.stack(losses)


def _save(
    path: Path, head: Head, optimizers, step: int, seconds: float, vocab: torch.Tensor
) -> None:
    state = {
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "seconds": seconds,
        "vocab": vocab,
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _load(work: Path, target: Target) -> tuple[Head, torch.Tensor]:
    device = target.embeddings.device
    state = torch.load(work / "head.pt", map_location=device)
    head = Head(Shape.of(target.config, len(state["vocab"]))).to(device)
    head.load_state_dict(state["head"])
    return head.eval(), state["vocab"]


@torch.inference_mode()
def evaluate(work: Path, target: Target, crops: Crops | None = None) -> None:
    """Print, by kind of text and token, the acceptance where all before is that of the text.

    At T=1 a token is accepted with the sum of min(p, q) over the vocabulary; at T=0 where the
    head's best token is the target's.
    """
    head, vocab = _load(work, target)
    crops = crops or Crops(work, target)
    by_kind: dict[str, list[torch.Tensor]] = {}
    for crop in crops.starts(crops.held_out, random.Random(0)):
        aux, embeds, last = crops.batch([crop])
        sums = torch.zeros(2, NUM_STEPS)
        for step, logits in enumerate(head(aux, embeds, NUM_STEPS)):
            target_logits = last[0, step : step + LENGTH] @ target.lm_head.T
            q, p = logits[0].softmax(-1), target_logits.softmax(-1)
            sums[0, step] = (vocab[q.argmax(-1)] == p.argmax(-1)).sum()
            sums[1, step] = torch.minimum(p[:, vocab], q).sum()
        by_kind.setdefault(crop[0].get("kind", "text"), []).append(sums / LENGTH)
    for kind, shares in sorted(by_kind.items()):
        for temperature, row in enumerate(torch.stack(shares).mean(0)):
            text = " ".join(f"{share:.3f}" for share in row.tolist())
            places = len(shares) * LENGTH
            print(f"{kind}, T={temperature}: {text} accepted, by token ({places:,} places)")


def export(work: Path, target: Target, out: Path) -> None:
    """Write the head as a ``LlamaForCausalLMEagle3`` checkpoint in bfloat16."""
    from safetensors.torch import save_file

    head, vocab = _load(work, target)
    weights = {n: p.bfloat16().contiguous() for n, p in head.state_dict().items()}
    # vLLM adds these offsets to the ids of the draft vocabulary.
    weights["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
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
