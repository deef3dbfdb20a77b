"""Promise: no source is given, or drafts, the tokens that stand for an image."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from vllm_triforce.runner_v1.levels import LevelsV1
from vllm_triforce.runner_v2.batch import Placeholders


def _request(token_ids: list[int], *places: tuple[int, int, list[bool] | None]):
    features = [
        SimpleNamespace(
            mm_position=SimpleNamespace(
                offset=offset,
                length=length,
                is_embed=None if is_embed is None else torch.tensor(is_embed),
            )
        )
        for offset, length, is_embed in places
    ]
    return SimpleNamespace(prefill_token_ids=token_ids, mm_features=features)


def test_ids_are_those_that_stand_for_an_embedding():
    features = {"image": ["a feature"], "text": []}
    cache = SimpleNamespace(mm_features=features)
    runner = SimpleNamespace(encoder_cache=cache, device=torch.device("cpu"))
    placeholders = Placeholders(runner)
    placeholders.add([_request([1, 2, 3])])
    seen = torch.tensor([[9, 8, 7, 1], [300, 0, 9, 9]], dtype=torch.int32)
    placeholders.drop_from(seen)
    assert seen.tolist() == [[9, 8, 7, 1], [300, 0, 9, 9]]
    placeholders.add([_request([1, 9, 9, 5, 8, 6, 8], (1, 2, None), (4, 3, [True, False, True]))])
    placeholders.drop_from(seen)
    assert seen.tolist() == [[-1, -1, 7, 1], [300, 0, -1, -1]]
    assert "image" in placeholders and "text" not in placeholders and "gone" not in placeholders
    assert "text" not in Placeholders(SimpleNamespace(encoder_cache=None, device=None))


@pytest.mark.parametrize("num_rows, longest", [(2, 19), (8, 4), (16, 4)])
def test_drafts_beyond_gamma_fit_the_positions(num_rows, longest):
    """Prompt lookup may draft more than ``gamma`` tokens where the controller chooses it."""
    batch = MagicMock(
        request_ids=list(map(str, range(num_rows))),
        max_num_tokens=[32] * num_rows,
        num_computed_tokens=[100] * num_rows,
        sampling=SimpleNamespace(take=lambda rows: SimpleNamespace(seeds=[])),
        __len__=lambda its: num_rows,
    )
    asked = {}

    def draft(batch, proposal, rows, max_tokens, *_):
        asked[num_rows] = max_tokens

    controller = SimpleNamespace(config=SimpleNamespace(gamma=4))
    level1 = SimpleNamespace(controller=controller, draft=draft)
    level2 = SimpleNamespace(max_tokens=40)
    noise = SimpleNamespace(begin=lambda *_: None)
    levels = LevelsV1(batch, level1, level2, noise, set())
    levels.draft(levels.unfinished())
    assert asked[num_rows] == [longest] * num_rows
