"""Requests of each pair: the same for both servers, different in every pair."""

import random
from collections.abc import Sequence
from pathlib import Path

from vllm_triforce_bench.bench import BadInput
from vllm_triforce_bench.bench.prompts import read_text
from vllm_triforce_bench.bench.serve.cells import HELD_OUT, RANDOM, Cell
from vllm_triforce_bench.bench.serve.settings import ServeSettings

_WARMUP = -1


class Requests:
    """Prompts as token ids.

    No two prompts begin at the same place of the text, so that no server meets a prompt that is in
    its prefix cache.

    Args:
        text: token ids that held-out prompts are cut from.
        vocabulary: token ids that random prompts are drawn from.
        bos_token_id: first token of each prompt; None if the tokenizer adds none.

    Raises:
        BadInput: the text is too short for all prompts.
    """

    def __init__(
        self,
        settings: ServeSettings,
        text: Sequence[int],
        vocabulary: Sequence[int],
        bos_token_id: int | None,
    ) -> None:
        self._settings, self._text, self._vocabulary = settings, text, vocabulary
        self._bos = bos_token_id
        self._starts: list[int] = []
        self._first_start: dict[tuple[int, int], int] = {}
        self._choose_starts()

    def of(self, pair: int, cell_index: int) -> list[list[int]]:
        """Prompts of a pair at a cell."""
        cell = self._settings.cells[cell_index]
        return self._prompts(cell, pair, cell_index, self._settings.num_requests(cell))

    def warmup(self, cell_index: int) -> list[list[int]]:
        """Prompts of a cell that are not measured."""
        cell = self._settings.cells[cell_index]
        return self._prompts(cell, _WARMUP, cell_index, self._settings.num_warmup(cell))

    def _choose_starts(self) -> None:
        """Choose the places of the text where prompts begin."""
        needed = 0
        for pair in (_WARMUP, *range(self._settings.pairs)):
            for i, cell in enumerate(self._settings.cells):
                if cell.needs_prompts:
                    self._first_start[pair, i] = needed
                    if pair == _WARMUP:
                        needed += self._settings.num_warmup(cell)
                    else:
                        needed += self._settings.num_requests(cell)
        longest = max((c.input_len for c in self._settings.cells if c.needs_prompts), default=0)
        available = len(self._text) - longest
        if needed > max(0, available):
            raise BadInput(
                f"--prompts {self._settings.prompts} has {len(self._text)} tokens; {needed} "
                f"different prompts of up to {longest} need {needed + longest}: use a longer text, "
                "or lower --pairs, --requests-per-run or --input-lens"
            )
        # The text's first token may be one that the tokenizer added.
        self._starts = random.Random(self._settings.seed).sample(range(1, 1 + available), needed)

    def _prompts(self, cell: Cell, pair: int, cell_index: int, number: int) -> list[list[int]]:
        draw = random.Random(f"{self._settings.seed} {pair} {cell_index}")
        prompts = []
        for i in range(number):
            is_random = cell.text == RANDOM or (cell.text != HELD_OUT and i % 2 == 0)
            if is_random:
                prompt = draw.choices(self._vocabulary, k=cell.input_len)
            else:
                start = self._starts[self._first_start[pair, cell_index] + i]
                prompt = list(self._text[start : start + cell.input_len])
            if self._bos is not None:
                prompt = [self._bos, *prompt[: cell.input_len - 1]]
            prompts.append(prompt)
        return prompts


def make(settings: ServeSettings, tokenizer) -> Requests:
    """Read the text; raise BadInput if it cannot be read, or is too short."""
    needs_text = any(cell.needs_prompts for cell in settings.cells)
    text: list[int] = []
    if needs_text and settings.prompts is not None:
        text = tokenizer(read_text(Path(settings.prompts)))["input_ids"]
    bos = tokenizer.bos_token_id
    adds_bos = tokenizer("a")["input_ids"][:1] == [bos]
    special = set(tokenizer.all_special_ids)
    vocabulary = [token for token in range(tokenizer.vocab_size) if token not in special]
    return Requests(settings, text, vocabulary, bos if adds_bos else None)
