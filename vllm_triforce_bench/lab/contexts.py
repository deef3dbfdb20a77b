"""Recorded contexts as token ids: stretches of text, and planted needles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_triforce_bench.lab.copies import NO_COPY
from vllm_triforce_bench.lab.needle import NeedleText, plant
from vllm_triforce_bench.lab.policies import Sizes
from vllm_triforce_bench.lab.settings import LabSettings


@dataclass(frozen=True)
class Replayed:
    """A replay of a recorded context, for an experiment, by a policy and a copy of the target."""

    experiment: str
    policy: str
    sizes: Sizes
    copy: str = NO_COPY

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.policy if self.copy == NO_COPY else f"{self.policy}, {self.copy}"


@dataclass(frozen=True)
class Context:
    """One recording and its replays.

    Args:
        replayed: tokens that follow the prompt, or the number of the target's own.
        answer: answer to a planted needle's question.
    """

    prompt: list[int]
    replayed: list[int] | int
    replays: list[Replayed]
    stretch: int
    answer: list[int] | None = None
    needle_depth: float | None = None


class Texts:
    """Token ids of the text files, cut into stretches.

    Every context ends at the end of its stretch: contexts of all lengths replay the same tokens.

    Args:
        tokenizer: transformers' tokenizer.

    Raises:
        ValueError: a text is too short for the longest context.
    """

    def __init__(self, tokenizer, settings: LabSettings) -> None:
        self.settings = settings
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        special = tokenizer.encode("")
        end = [tokenizer.eos_token_id]
        self.prefix: list[int] = [] if special == end else special  # T5-like tokenizers end with it
        needed = settings.longest_context + settings.replay_tokens + 1
        self._texts: list[list[int]] = []
        for path in settings.text:
            ids = self._encode(path.read_text(encoding="utf-8"))
            if len(ids) < needed:
                raise ValueError(
                    f"text {str(path)!r} has {len(ids)} tokens, fewer than the {needed} of the "
                    "longest context and its replay; use a longer text or shorter contexts"
                )
            self._texts.append(ids)

    def contexts(self) -> Iterator[Context]:
        """Yield every recording of the run, the shortest first."""
        settings = self.settings
        replays: dict[int, list[Replayed]] = {}
        for experiment in settings.experiments:
            if experiment != "needle":
                for replayed, length in self._replays(experiment):
                    replays.setdefault(length, []).append(replayed)
        for length in sorted(replays):
            # One copy of the target at a time is in memory.
            replays[length].sort(key=lambda replayed: settings.copies.index(replayed.copy))
            for stretch in range(settings.stretches):
                yield self._stretch(length, replays[length], stretch)
        if "needle" in settings.experiments and settings.needle is not None:
            yield from self._needles(settings.needle)

    def _replays(self, experiment: str) -> list[tuple[Replayed, int]]:
        """List an experiment's replays, each with the length of its context."""
        return [
            (Replayed(experiment, policy, sizes, copy), length)
            for copy in self.settings.copies
            for policy, sizes, length in self.settings.points(experiment)
        ]

    def _end(self, stretch: int) -> tuple[Sequence[int], int]:
        """Return a text, and the end of a stretch's prompt in it; ends are spread evenly."""
        texts, settings = self._texts, self.settings
        ids = texts[stretch % len(texts)]
        turns = -(-(settings.stretches - stretch % len(texts)) // len(texts))
        turn = stretch // len(texts)
        last = len(ids) - settings.replay_tokens - 1
        first = settings.longest_context
        return ids, last - (turns - 1 - turn) * (last - first) // max(1, turns - 1)

    def _stretch(self, length: int, replays: list[Replayed], stretch: int) -> Context:
        ids, end = self._end(stretch)
        prompt = [*self.prefix, *ids[end - length + len(self.prefix) : end]]
        count = self.settings.replay_tokens
        replayed = list(ids[end : end + count]) if self.settings.replay == "text" else count
        return Context(prompt, replayed, replays, stretch)

    def _needles(self, text: NeedleText) -> Iterator[Context]:
        settings = self.settings
        replays = [replayed for replayed, _ in self._replays("needle")]
        for repeat in range(settings.needle_repeats):
            ids, end = self._end(repeat % settings.stretches)
            filler = ids[end - settings.context : end]
            for depth in settings.needle_depths:
                needle = plant(
                    self._encode,
                    self.prefix,
                    filler,
                    text,
                    settings.context,
                    depth,
                    seed=settings.seed + repeat,
                )
                yield Context(needle.prompt, needle.replayed, replays, repeat, needle.answer, depth)
