"""Train the small target/draft pair in `examples/models` on a CPU, from text every Python has.

The text is the standard library's own source, tests included. Some modules are held out: they
are the prompts and the measure. The pair is small enough to train in about an hour on two
cores, and shaped for hierarchical speculation at long context: the target's attention is wider
than its hidden size, so its KV cache dominates from a few thousand tokens on, and its positions
reach 65,536; the draft knows 2,048 positions and is only ever shown a short window.

Large models put most of their attention on few tokens at long context, so a sparse KV cache
hardly changes what they say. A model that saw a few million tokens does not: its heads average
over everything. Therefore, on sequences of 2,048 and more, the target is also run with sparse
attention (first block, recent blocks, blocks of the best mean keys: as at level 2, with budgets
of a sixteenth to an eighth of the length), and how far its two outputs differ is part of the
loss.

    python train_pair.py --work build target --minutes 60     # tokenizer, then the target
    python train_pair.py --work build draft --minutes 10      # text, then the target's own outputs
    python train_pair.py --work build export --out models     # LlamaForCausalLM checkpoints
    python train_pair.py --work build eval                    # held-out loss by context depth
    python train_pair.py --work build prompts --out prompts   # the held-out text itself

On a GPU, `--device cuda --size medium --rows-factor 16 --micro-tokens 32768 --more-text FOLDER`
trains a pair of tens of millions of parameters in minutes, in bfloat16, on more sources. A batch
goes through in parts of so many tokens: what it keeps for the way back is over a MB a token.

Training is paced by the clock: the learning rate, and the length of the sequences, follow the
share of `--minutes` that has passed. It saves its state every minute; `--resume` goes on, and
more `--minutes` than before continue the schedule from the share now reached.
"""

import argparse
import hashlib
import itertools
import os
import re
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BOS, EOS, VOCAB = 1, 2, 4096
HELD_OUT = {"asyncio", "email", "argparse", "dataclasses", "tarfile", "typing"}
HELD_OUT_HELPERS = re.compile(r"dataclass_module_|ann_module|mod_generics_cache|_typed_dict_helper")
SKIPPED = {"site-packages", "__pycache__", "encodings", "pydoc_data"}


# ------------------------------------------------------------------------------------ text


def sources(root, skipped):
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not skipped & set(parts):
            try:
                yield parts, path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def documents(more_text=None, most_bytes=80_000_000):
    """The standard library's sources, and those of another folder up to a number of bytes:
    (path, text, held out?), a module beside its tests."""
    seen, found, size = set(), [], 0
    stdlib = sources(Path(sysconfig.get_paths()["stdlib"]), SKIPPED)
    more = sources(Path(more_text), {"__pycache__"}) if more_text else ()
    for parts, text in itertools.chain(stdlib, more):
        digest = hashlib.sha1(text.encode()).digest()
        tabular = sum(c.isdigit() for c in text) > 0.2 * len(text)  # tables of numbers
        if len(text) < 200 or tabular or digest in seen:
            continue
        seen.add(digest)
        size += len(text)
        if size > most_bytes:
            break
        names = [p.removesuffix(".py").removeprefix("test_") for p in parts]
        held = bool(HELD_OUT & set(names) or HELD_OUT_HELPERS.match(parts[-1]))
        topic = [n for n in names if n not in ("test", "tests")]
        found.append((topic, "test" in parts, "/".join(parts), text, held))
    return [d[2:] for d in sorted(found)]


def make_tokenizer(texts, path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<unk>", "<s>", "</s>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tok.save(str(path.with_suffix(".tmp")))
    os.replace(path.with_suffix(".tmp"), path)
    return tok


def load_text(work, more_text=None):
    """Token streams (training, held out); makes the tokenizer on first use."""
    from tokenizers import Tokenizer

    cache, path = work / "tokens.pt", work / "tokenizer.json"
    if not cache.exists():
        docs = documents(more_text)
        tok = (
            Tokenizer.from_file(str(path))
            if path.exists()
            else make_tokenizer((t for _, t, held in docs if not held), path)
        )
        streams = {False: [], True: []}
        for (_, _, held), enc in zip(
            docs, tok.encode_batch([t for _, t, _ in docs], add_special_tokens=False)
        ):
            streams[held] += [*enc.ids, EOS]
        save(cache, [torch.tensor(streams[h], dtype=torch.int32) for h in (False, True)])
    train, held = torch.load(cache)
    return train.long(), held.long()


class Windows:
    """Windows of the stream, without replacement: cut at a random offset, shuffled, again.

    They are cut on the CPU and handed over on `device`."""

    def __init__(self, stream, seed, device="cpu"):
        self.stream, self.rng, self.starts = stream, torch.Generator().manual_seed(seed), {}
        self.device = device

    def rand(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.rng))

    def batch(self, rows, length, repeat=0.0):
        """[rows, length + 1] tokens; every row begins with BOS, the sink. In a share `repeat`
        of them a span reappears further on, which teaches copying from far back early."""
        out = []
        for _ in range(rows):
            if not self.starts.get(length):
                n = (len(self.stream) - length - 1) // length
                starts = torch.randperm(n, generator=self.rng) * length + self.rand(0, length)
                self.starts[length] = starts.tolist()
            i = self.starts[length].pop()
            row = self.stream[i : i + length + 1].clone()
            if self.rand(0, 1000) < 1000 * repeat:
                n = self.rand(16, length // 4)
                a = self.rand(1, length - 2 * n)
                b = self.rand(a + n, length - n + 1)
                row[b : b + n] = row[a : a + n].clone()
            row[0] = BOS
            out.append(row)
        return torch.stack(out).to(self.device)

    def positions(self, rows, length, limit, skip=0.0):
        """Positions 0, 1, 2 ...; in a share `skip` of the rows with two jumps somewhere, so that
        distances up to `limit` are met without sequences that long (as PoSE does)."""
        pos = torch.arange(length).repeat(rows, 1)
        for row in pos:
            if self.rand(0, 1000) < 1000 * skip:
                room = self.rand(0, limit - length)
                first = self.rand(0, room + 1)
                row[self.rand(1, length) :] += first
                row[self.rand(1, length) :] += room - first
        return pos.to(self.device)


# ----------------------------------------------------------------------------------- model


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


class Layer(nn.Module):
    """A Llama layer. Matrices that share an input are stacked in one parameter."""

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
        """Cross entropy; with `sparse`, plus how far sparse attention leads astray from full."""
        logits = self(tokens[:, :-1], positions).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        if sparse is None:
            return loss, torch.stack((loss.detach(), loss.new_zeros(())))
        other = self(tokens[:, :-1], positions, sparse).flatten(0, 1)
        astray = F.kl_div(
            (2 * other).log_softmax(-1),
            (2 * logits).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )  # sharpened: argmaxes matter
        return loss + 2 * astray, torch.stack((loss.detach(), astray.detach()))

    def distil(self, tokens, positions, teacher_logits):
        logits = self(tokens[:, :-1], positions).flatten(0, 1).float()
        loss = -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return loss, torch.stack((loss.detach(), loss.new_zeros(())))


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for the matrices (Newton-Schulz, all layers at once)."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape[1:], []).append(p)
            for (rows, cols), params in by_shape.items():
                update = []
                for p in params:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    update.append(p.grad.lerp(m, group["momentum"]))
                x = torch.cat(update)
                x = x.mT if rows > cols else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(5):
                    y = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
                x = (x.mT if rows > cols else x) * max(1, rows / cols) ** 0.5
                for p, u in zip(params, x.split([len(p) for p in params])):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(u, alpha=group["lr"])


# -------------------------------------------------------------------------------- training

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


def save(path, state):
    """In one piece: whoever ends us leaves the old or the new one."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_model(work, name, device="cpu"):
    state = torch.load(work / f"{name}.pt", map_location=device)
    model = Llama(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval()


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


# -------------------------------------------------------------------------- export and eval


def export(work, out):
    """Both models as LlamaForCausalLM folders, each written beside its place and moved in."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(work / "tokenizer.json")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    for name in SIZES["small"]:
        if not (work / f"{name}.pt").exists():
            continue
        model = load_model(work, name)
        s = model.shape
        weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
        for i, layer in enumerate(model.layers):
            named = {
                "self_attn.o_proj": layer.out[0],
                "mlp.down_proj": layer.down[0],
                "input_layernorm": layer.norm1,
                "post_attention_layernorm": layer.norm2,
            }
            named.update(
                zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv)
            )
            named.update(zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up))
            weights.update({f"model.layers.{i}.{k}.weight": v for k, v in named.items()})
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.heads,
            head_dim=s.head_dim,
            rms_norm_eps=1e-6,
            max_position_embeddings=s.positions,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": s.theta},
            tie_word_embeddings=True,
        )
        hf = LlamaForCausalLM(config).eval()
        missing, unknown = hf.load_state_dict(weights, strict=False)
        assert missing in ([], ["lm_head.weight"]) and not unknown, (missing, unknown)
        hf.tie_weights()
        ids = torch.randint(3, VOCAB, (1, 300))
        with torch.no_grad():
            error = (hf(ids).logits - model(ids, torch.arange(300)[None])).abs().max()
        assert error < 1e-3, f"{name}: transformers computes something else ({error})"
        folder, fresh = out / name, out / f".{name}.{os.getpid()}"
        hf.to(torch.bfloat16).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        for file in fresh.iterdir():
            file.chmod(0o644)
            os.replace(file, folder / file.name)
        fresh.rmdir()
        print(
            f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
            f"logits as in transformers to {error:.1e}"
        )


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


def write_prompts(out, size=125_000):
    """Held-out text, whole files joined: one long file, and some by topic."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {path: text for path, text, held in documents() if held}
    long = [texts[f"{name}.py"] for name in ("argparse", "dataclasses", "tarfile")]
    (out / "held_out.txt").write_text("\n\n".join(long))
    for topic in ("asyncio", "email", "typing"):
        chosen = ""
        for path, text in texts.items():
            if path.split("/")[0] in (topic, f"{topic}.py") and len(chosen) + len(text) < size:
                chosen += text + "\n\n"
        (out / f"{topic}.txt").write_text(chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["target", "draft", "export", "eval", "prompts"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows-factor", type=int, default=1, help="more rows a batch: for a GPU")
    parser.add_argument(
        "--micro-tokens", type=int, help="a batch goes through in parts of so many tokens"
    )
    parser.add_argument("--more-text", type=Path, help="a folder with more Python sources")
    parser.add_argument("--work", type=Path, default=Path("build"), help="state between runs")
    parser.add_argument("--out", type=Path, help="where export and prompts write")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    parser.add_argument("--lr", type=float, default=0.02, help="of the matrices; a fifth elsewhere")
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of the time")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what in SIZES["small"]:
        train(args.what, args)
    elif args.what == "export":
        export(args.work, args.out or Path("models"))
    elif args.what == "eval":
        evaluate(args.work)
    else:
        write_prompts(args.out or Path("prompts"))


if __name__ == "__main__":
    main()
