"""What requests propose where nothing chooses it: always the same."""

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import ROUND_PRIOR
from vllm_triforce.controller.choice import LEVELS
from vllm_triforce.core.step_plan import Proposing


def fixed_proposing(config: ResolvedConfig, most: int) -> Proposing:
    """By the configuration alone.

    Args:
        most: tokens of the proposal at most, above 0.
    """
    if config.levels == "1,3":
        return Proposing(config.sources[0], most, -(-most // config.gamma))
    per_round = 1 if config.levels == "2,3" else int(ROUND_PRIOR)
    return Proposing(LEVELS, most, -(-most // per_round))
