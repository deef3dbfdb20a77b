"""Recorded contexts as token ids: stretches of text."""

from dataclasses import dataclass
from pathlib import Path

from vllm_triforce_bench.lab.settings import LabSettings, Replayed


@dataclass(frozen=True)
class Context:
    """One recording and its replays.

    Args:
        replayed: tokens that follow the prompt, or the number of the target's own.
        stretch: number of the stretch of text.
    """

    prompt: list[int]
    replayed: list[int] | int
    replays: list[Replayed]
    stretch: int

    @property
    def num_replayed(self) -> int:
        return self.replayed if isinstance(self.replayed, int) else len(self.replayed)


def read_contexts(tokenizer, settings: LabSettings) -> list[Context]:
    """Cut the texts into stretches, and list every recording of the run, the shortest first.

    Every context ends at the end of its stretch: contexts of all lengths replay the same tokens.

    Args:
        tokenizer: transformers' tokenizer.

    Raises:
        ValueError: a text is too short for the longest context.
    """
    special = tokenizer.encode("")
    prefix = [] if special == [tokenizer.eos_token_id] else special  # T5-like ones end with it
    texts = [_read(path, tokenizer, settings) for path in settings.text]
    # One copy of the target at a time is in memory.
    replays = sorted(settings.replays(), key=lambda each: settings.copies.index(each.copy))
    contexts = []
    for length in sorted({replay.context for replay in replays}):
        for stretch in range(settings.stretches):
            ids, end = _end_of(stretch, texts, settings)
            prompt = [*prefix, *ids[end - length + len(prefix) : end]]
            count = settings.replay_tokens
            replayed = ids[end : end + count] if settings.replay == "text" else count
            at_length = [replay for replay in replays if replay.context == length]
            contexts.append(Context(prompt, replayed, at_length, stretch))
    return contexts


def _read(path: Path, tokenizer, settings: LabSettings) -> list[int]:
    """
    Raises:
        ValueError: the text is too short.
    """
    ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) < settings.num_tokens:
        raise ValueError(
            f"text {str(path)!r} has {len(ids)} tokens, fewer than the {settings.num_tokens} of "
            "the longest context and its replay; use a longer text or shorter contexts"
        )
    return ids


def _end_of(stretch: int, texts: list[list[int]], settings: LabSettings) -> tuple[list[int], int]:
    """Return a text, and the end of a stretch's prompt in it; ends are spread evenly."""
    turn, number = divmod(stretch, len(texts))
    num_turns = len(range(number, settings.stretches, len(texts)))
    last = len(texts[number]) - settings.replay_tokens - 1
    room = len(texts[number]) - settings.num_tokens
    return texts[number], last - (num_turns - 1 - turn) * room // max(1, num_turns - 1)
