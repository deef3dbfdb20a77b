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
# Answers that are written together.
GROUP = 32


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
        rows += [{"tokens": window, "begin": 0} for window in windows[:share]]
    rng.shuffle(rows)
    _write(work / "documents.jsonl", rows)


def write_answers(
    work: Path, target: str, num_answers: int, num_excerpt: int, num_tokens: int
) -> None:
    """Let the target answer to excerpts of the documents, half of them by continuing the text.

    The answers are greedy, sampled at temperature 0.7, and at 1.
    """
    from vllm import LLM, SamplingParams

    documents = read(work / "documents.jsonl")
    llm = LLM(
        target,
        dtype="float32",
        max_model_len=num_excerpt + num_tokens + 256,
        max_num_seqs=GROUP,
        kv_cache_memory_bytes=4 << 30,
        enforce_eager=True,
    )
    tokenizer, path = llm.get_tokenizer(), work / "answers.jsonl"
    first = len(read(path)) if path.exists() else 0
    while first < num_answers:
        prompts, params = [], []
        for i in range(first, min(first + GROUP, num_answers)):
            tokens, rng = documents[i % len(documents)]["tokens"], random.Random(i)
            start = rng.randrange(max(1, len(tokens) - num_excerpt))
            excerpt = tokens[start : start + num_excerpt]
            if i % 2:
                question = QUESTIONS[i // 2 % len(QUESTIONS)]
                text = f"{tokenizer.decode(excerpt)}\n\n{question}"
                excerpt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
            prompts.append(excerpt)
            temperature = TEMPERATURES[i // 2 % len(TEMPERATURES)]
            params.append(SamplingParams(temperature=temperature, max_tokens=num_tokens))
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        # Half of the prompt is learnt from as well: it costs the same.
        rows = [
            {"tokens": [*prompt, *output.outputs[0].token_ids], "begin": len(prompt) // 2}
            for prompt, output in zip(prompts, outputs)
        ]
        _write(path, rows, "a")
        first += len(prompts)


def read(path: Path) -> list[dict]:
    """Read sequences: ``tokens``, and ``begin``, the first that is learnt from."""
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
