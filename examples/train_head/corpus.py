"""Text that the head learns from: windows of documents, and the target's own answers."""

import itertools
import json
import random
from pathlib import Path

SUFFIXES = {".py", ".md", ".rst", ".txt", ".pod"}
NAMES = {"METADATA", "README"}
MIN_CHARACTERS = 2000
QUESTIONS = (
    "Summarize this text in a few sentences.",
    "Explain what this text is about, step by step.",
    "Write three questions about this text, with their answers.",
    "List the most important points of this text.",
    "Continue this text.",
    "What would a beginner find hard here? Explain it with an example.",
)
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)
KINDS = ("continuation", "answer", "conversation")
# Answers that are written together, by device.
GROUPS = {"cpu": 32, "cuda": 1024}


def write_documents(
    work: Path,
    target: str,
    groups: list[list[Path]],
    excluded: list[str],
    num_windows: int,
    context: int,
) -> None:
    """Write ``num_windows`` windows of ``context`` tokens, equally many of each group of texts.

    Raises:
        ValueError: a group has too little text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    rng, rows = random.Random(0), []
    share = -(-num_windows // len(groups))
    for group in groups:
        files = sorted(set(itertools.chain.from_iterable(map(_files, group))))
        files = [file for file in files if not set(file.parts) & set(excluded)]
        rng.shuffle(files)
        windows: list[list[int]] = []
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")
            if len(text) < MIN_CHARACTERS:
                continue
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            # At most three of a file, so that no long one is all of the text.
            starts = range(0, max(1, len(tokens) - context + 1), context)
            for start in rng.sample(starts, min(3, len(starts))):
                windows.append(tokens[start : start + context])
            if len(windows) >= share:
                break
        if len(windows) < share:
            raise ValueError(
                f"{group} has text for {len(windows)} windows of {share}; name more text, or "
                "lower --windows"
            )
        rows += [{"kind": "document", "tokens": w, "begin": 0} for w in windows[:share]]
    rng.shuffle(rows)
    _write(work / "documents.jsonl", rows)


def write_answers(
    work: Path, target: str, device: str, num_answers: int, num_excerpt: int, num_tokens: int
) -> None:
    """Let the target continue excerpts of the documents, answer questions, and chat with itself.

    A third are continuations, a third answers to questions about excerpts, and a third whole
    conversations: what it samples where its chat template has a user's text (arXiv 2406.08464).
    The former are greedy, sampled at temperature 0.7, and at 1. None ends before ``num_tokens``:
    behind its answer the target writes the user's next message.
    """
    from vllm import LLM, SamplingParams

    documents = read(work / "documents.jsonl")
    on_cpu = device == "cpu"
    path = work / "answers.jsonl"
    first = len(read(path)) if path.exists() else 0
    llm = LLM(
        target,
        dtype="float32" if on_cpu else "auto",
        max_model_len=num_excerpt + num_tokens + 256,
        max_num_seqs=GROUPS[device] // (1 if on_cpu else 2),
        kv_cache_memory_bytes=4 << 30 if on_cpu else None,
        seed=first,  # further conversations begin with other draws
        enforce_eager=on_cpu,
        compilation_config={"mode": 0},  # torch.compile would take longer than it saves
    )
    tokenizer = llm.get_tokenizer()
    opening = _opening(tokenizer)
    while first < num_answers:
        prompts, params, kinds = [], [], []
        for i in range(first, min(first + GROUPS[device], num_answers)):
            turn, kind, rng = i // len(KINDS), KINDS[i % len(KINDS)], random.Random(i)
            tokens = documents[turn % len(documents)]["tokens"]
            start = rng.randrange(max(1, len(tokens) - num_excerpt))
            excerpt = tokens[start : start + rng.randint(num_excerpt // 8, num_excerpt)]
            temperature = TEMPERATURES[turn % len(TEMPERATURES)]
            if kind == "answer":
                question = QUESTIONS[turn % len(QUESTIONS)]
                excerpt = _chat(tokenizer, f"{tokenizer.decode(excerpt)}\n\n{question}")
            elif kind == "conversation":
                excerpt, temperature = opening, 1.0
            prompts.append(excerpt)
            kinds.append(kind)
            params.append(
                SamplingParams(
                    temperature=temperature,
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
            )
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        # Half of the prompt is learnt from as well: it costs the same.
        rows = [
            {
                "kind": kind,
                "tokens": [*prompt, *out.outputs[0].token_ids],
                "begin": len(prompt) // 2,
            }
            for kind, prompt, out in zip(kinds, prompts, outputs)
        ]
        _write(path, rows, "a")
        first += len(prompts)


def _opening(tokenizer) -> list[int]:
    """Return the tokens of a conversation up to where the user's text begins."""
    template = tokenizer.apply_chat_template([{"role": "user", "content": "{}"}], tokenize=False)
    return list(tokenizer(template.split("{}")[0], add_special_tokens=False)["input_ids"])


def _chat(tokenizer, text: str) -> list[int]:
    """Return the tokens of a conversation up to the first answer."""
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(chat["input_ids"])


def read(path: Path) -> list[dict]:
    """Read sequences: ``kind``, ``tokens``, and ``begin``, the first that is learnt from."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sequences(work: Path) -> list[dict]:
    """Return all sequences; answers and documents take turns."""
    documents = read(work / "documents.jsonl")
    answers = read(work / "answers.jsonl") if (work / "answers.jsonl").exists() else []
    pairs = itertools.zip_longest(answers, documents)
    return [row for row in itertools.chain.from_iterable(pairs) if row is not None]


def _files(path: Path) -> list[Path]:
    """List the texts of a folder, or the file itself."""
    if path.is_file():
        return [path]
    files = (f for f in path.rglob("*") if f.suffix in SUFFIXES or f.name in NAMES)
    return [f for f in files if f.is_file()]


def _write(path: Path, rows: list[dict], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{path}: {len(rows)} sequences, {sum(len(r['tokens']) for r in rows):,} tokens")
