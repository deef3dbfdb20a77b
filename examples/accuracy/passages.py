"""Passages of Python's reference, each with the word that follows it, for lm_eval."""

import re
from pydoc_data.topics import topics

import datasets

_WORD = re.compile(r"\s([a-z]{3,})\b")


def load(characters: int = 2000, **_) -> dict[str, datasets.Dataset]:
    """Cut each topic that is long enough before a word.

    Args:
        characters: of a passage, or some more; about four make a token.
    """
    passages = []
    for topic, text in sorted(topics.items()):
        if word := _WORD.search(text, characters):
            passages.append({"topic": topic, "passage": text[: word.start()], "word": word[1]})
    return {"test": datasets.Dataset.from_list(passages)}
