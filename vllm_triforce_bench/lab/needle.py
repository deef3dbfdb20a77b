"""A planted needle: a fact somewhere in the context, and a question at its end that needs it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SYLLABLES = [
    *("bra", "dov", "fen", "gul", "hix", "jor", "kem", "lun", "mip"),
    *("nax", "pol", "quz", "ros", "sib", "tuv", "wex", "yor", "zil"),
]


def _fills(rng: random.Random) -> dict[str, str]:
    names = {name: "".join(rng.sample(_SYLLABLES, 2)) for name in "abcd"}
    return {"key": str(rng.randint(10_000, 99_999)), **names}


@dataclass(frozen=True)
class NeedleText:
    """Three templates; ``{key}`` is a random number, ``{a}`` to ``{d}`` are random identifiers.

    Raises:
        ValueError: a template has another name, or is empty.
    """

    fact: str  # planted
    question: str  # end of the prompt
    answer: str  # replayed

    def __post_init__(self) -> None:
        for part in ("fact", "question", "answer"):
            template = getattr(self, part)
            try:
                filled = template.format_map(_fills(random.Random(0)))
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(
                    f"needle {part} {template!r} cannot be filled in ({error!r}); use only "
                    "{key}, {a}, {b}, {c}, {d}, and double braces for braces"
                ) from error
            if not filled:
                raise ValueError(f"the needle's {part} is empty; give some text")

    def filled(self, seed: int) -> tuple[str, str, str]:
        """Fill in a random number and names; returns fact, question and answer."""
        fills = _fills(random.Random(seed))
        fact, question, answer = self.fact, self.question, self.answer
        return fact.format_map(fills), question.format_map(fills), answer.format_map(fills)


PRESETS = {
    "pass-key": NeedleText(
        "\nThe pass key is {key}. Remember it. {key} is the pass key.\n",
        "\nWhat is the pass key? The pass key is",
        " {key}.",
    ),
    # For models that repeat but do not answer: a line of code whose beginning comes again.
    "code-line": NeedleText(
        "\n    {a}_{b} = {c}({d}, size={key}, name='{b}_{d}')\n",
        "\n    {a}_{b} =",
        " {c}({d}, size={key}, name='{b}_{d}')\n",
    ),
}


@dataclass(frozen=True)
class PlantedNeedle:
    """A prompt with a needle.

    Args:
        replayed: the question's last token, and the answer without its last token.
        answer: correct token after each replayed token.
    """

    prompt: list[int]
    replayed: list[int]
    answer: list[int]


def plant(
    encode: Callable[[str], list[int]],
    prefix: Sequence[int],
    filler: Sequence[int],
    text: NeedleText,
    context: int,
    depth: float,
    seed: int,
) -> PlantedNeedle:
    """Build a prompt of exactly ``context`` tokens.

    Args:
        encode: tokenizer without special tokens.
        prefix: special tokens that begin a prompt.
        filler: at least ``context`` token ids of text.
        depth: share of the filler before the fact, 0 to 1.
        seed: seed of the random number and names.

    Raises:
        ValueError: the filler or the context is too short.
    """
    fact, question, answer = (encode(part) for part in text.filled(seed))
    room = context - len(prefix) - len(fact) - len(question) + 1
    if room < 0 or room > len(filler):
        raise ValueError(
            f"a needle of {len(fact)} and {len(question)} tokens and {len(filler)} tokens of text "
            f"do not make a context of {context}; use another context or more text"
        )
    split = round(depth * room)
    prompt = [*prefix, *filler[:split], *fact, *filler[split:room], *question[:-1]]
    return PlantedNeedle(prompt, [question[-1], *answer[:-1]], answer)
