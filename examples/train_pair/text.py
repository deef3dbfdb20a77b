"""Python sources as documents, their tokenizer, and windows of their token streams."""

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


def documents(more_text=None, max_bytes=80_000_000):
    """List the sources of the standard library and of another folder, modules beside their tests.

    Returns:
        (path, text, True if held out) of each document.
    """
    digests, docs, num_bytes = set(), [], 0
    stdlib = sources(Path(sysconfig.get_paths()["stdlib"]), SKIPPED)
    more = sources(Path(more_text), {"__pycache__"}) if more_text else ()
    for parts, text in itertools.chain(stdlib, more):
        digest = hashlib.sha1(text.encode()).digest()
        is_table = sum(c.isdigit() for c in text) > 0.2 * len(text)  # of numbers
        if len(text) < 200 or is_table or digest in digests:
            continue
        digests.add(digest)
        num_bytes += len(text)
        if num_bytes > max_bytes:
            break
        names = [p.removesuffix(".py").removeprefix("test_") for p in parts]
        is_held_out = bool(HELD_OUT & set(names) or HELD_OUT_HELPERS.match(parts[-1]))
        topic = [n for n in names if n not in ("test", "tests")]
        docs.append((topic, "test" in parts, "/".join(parts), text, is_held_out))
    return [d[2:] for d in sorted(docs)]


def load_text(work, more_text=None):
    """Load the token streams for training and evaluation; train the tokenizer on first use."""
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
    """Windows of the stream without replacement: cut at a random offset, shuffled, then cut again.

    They are cut on the CPU and moved to `device`.
    """

    def __init__(self, stream, seed, device="cpu"):
        self.stream, self.rng, self.starts = stream, torch.Generator().manual_seed(seed), {}
        self.device = device

    def rand(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.rng))

    def batch(self, rows, length, repeat=0.0):
        """Draw [rows, length + 1] tokens; every row begins with BOS, the sink.

        In a share `repeat` of the rows, a span is repeated later on, which teaches copying over
        long distances early.
        """
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
        """Draw [rows, length] positions, with two jumps in a share `skip` of the rows.

        Jumps train distances up to `limit` on shorter sequences, as in PoSE (arXiv 2309.10400).
        """
        pos = torch.arange(length).repeat(rows, 1)
        for row in pos:
            if self.rand(0, 1000) < 1000 * skip:
                room = self.rand(0, limit - length)
                first = self.rand(0, room + 1)
                row[self.rand(1, length) :] += first
                row[self.rand(1, length) :] += room - first
        return pos.to(self.device)


def write_prompts(out, size=125_000):
    """Write the held-out text as prompts: one long file and one for each topic."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {path: text for path, text, held in documents() if held}
    long = [texts[f"{name}.py"] for name in ("argparse", "dataclasses", "tarfile")]
    (out / "held_out.txt").write_text("\n\n".join(long))
    for topic in ("asyncio", "email", "typing"):
        prompt = ""
        for path, text in texts.items():
            if path.split("/")[0] in (topic, f"{topic}.py") and len(prompt) + len(text) < size:
                prompt += text + "\n\n"
        (out / f"{topic}.txt").write_text(prompt)


def make_tokenizer(texts, path):
    """Train the byte-level BPE tokenizer of both models, and save it."""
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
    """Save atomically: an interrupted run leaves the old file or the new one."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
