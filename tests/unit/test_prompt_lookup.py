"""Promise: prompt lookup drafts what followed the longest earlier occurrence."""

import numpy as np
import pytest

from vllm_triforce.runner_v1.sources.prompt_lookup import PromptLookup


def on_host(token_ids: np.ndarray, max_ngram: int, count: int) -> list[int]:
    lookup = PromptLookup(max_ngram)
    match = lookup.find(token_ids)
    return [] if match is None else lookup.continue_from(token_ids, match, count)


@pytest.mark.parametrize(
    "tokens, drafted",
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([5, 1, 2, 7, 7, 2, 8, 8, 1, 2], [7, 7, 2]),  # the longer match beats the newer one
        ([1, 2, 1, 2], [1, 2, 1]),  # the match reaches the end: the loop goes on
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup(tokens, drafted):
    assert on_host(np.array(tokens, np.int32), 4, 3) == drafted
