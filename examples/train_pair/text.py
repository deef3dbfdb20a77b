"""Sources of Python code, as documents and as streams of tokens; what is held out."""

import hashlib
import itertools
import re
import sysconfig
from pathlib import Path

import torch

from .state import save
from .tokenizer import EOS, make_tokenizer

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
