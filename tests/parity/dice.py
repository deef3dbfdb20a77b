"""Plans by dice, in the place of the controller's: nothing may depend on how good one is."""

import random
from collections.abc import Mapping

from vllm_triforce.controller.routes import HIERARCHICAL, Choice


class Dice:
    """Of one engine on Model Runner V2.

    Args:
        speculator: ours; prompt lookup is made one of its sources.
    """

    def __init__(self, speculator, seed: int) -> None:
        from vllm_triforce.runner_v2.sources.prompt_lookup import PromptLookupV2

        sources = speculator.built.speculator.sources
        sources.setdefault("prompt_lookup", PromptLookupV2(8))
        self._routes = [HIERARCHICAL, HIERARCHICAL, *sources]
        self._draw = random.Random(seed)

    def proposing(self, able: Mapping[str, int]) -> dict[str, Choice]:
        """Each request proposes nothing, or some tokens by some route, in some rounds that may be
        too few.

        Args:
            able: tokens that each request may propose at most.
        """
        draw = self._draw
        return {
            name: Choice(draw.choice(self._routes), draw.randint(1, most), draw.randint(1, 4))
            for name, most in able.items()
            if draw.random() < 0.8
        }
