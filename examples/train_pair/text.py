"""Python sources as documents and token streams, their tokenizer, and windows of them."""

import hashlib
import itertools
import os
import re
import sysconfig
from pathlib import Path

import torch

BOS, EOS, VOCAB = 1, 2, 4096
HELD_OUT = {"asyncio", "email", "argparse", "dataclasses", "tarfile", "typing"}
HELD_OUT_HELPERS = re.compile(r"dataclass_module_|ann_module|mod_generics_cache|_typed_dict_helper")
SKIPPED = {"site-packages", "__pycache__", "encodings", "pydoc_data"}


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


def save(path, state):
    """In one piece: whoever ends us leaves the old or the new one."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
