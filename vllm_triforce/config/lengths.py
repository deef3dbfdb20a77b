"""How many tokens are proposed and drafted, and who chooses: where it was not said."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_triforce.config.asked import TriForceConfig

# What the controller may choose.
CHOICES = ("context", "gamma", "length")

# The paper's gamma 2 and gamma 1, used where nothing is chosen from measurements.
FIXED_LENGTH, FIXED_GAMMA = 6, 2
# Bounds of what the controller chooses. Past 32 tokens an acceptance of 0.97 a token gives less
# than 0.4 of a token for each one more.
_MOST_LENGTH, MOST_GAMMA = 32, 4
# Where every place of a proposal has a distribution on the device, used or not.
_MOST_FIXED_LENGTH = 12
# A full pass over host memory is dear; the paper's settings have 12 to 16. Distributions are there
# for all requests that may run at a time (``max_num_seqs``): for 16 of them, and a vocabulary of
# 128,256, 32 tokens take 0.13 GiB.
_MOST_OFFLOADED_LENGTH, FEW_REQUESTS = 16, 16


def fill_lengths(
    asked: "TriForceConfig", can_adapt: bool, has_fixed_shapes: bool, max_num_seqs: int | None
) -> dict[str, Any]:
    """Keys of ``TriForceConfig`` that were left open, and ``adapts``.

    Args:
        can_adapt: whether the model runner in use has a controller.
        has_fixed_shapes: whether level 1 drafts as much for every pass of level 2.
        max_num_seqs: vLLM's; None where it is not given.
    """
    if asked.is_plain:  # vLLM has no speculative method without a token
        return {"num_speculative_tokens": 1, "gamma": 1, "adapts": ""}
    open_ = {
        "context": asked.min_context is None,
        "gamma": asked.gamma is None and asked.levels == "1,2,3",
        "length": asked.num_speculative_tokens is None,
    }
    adapts = [name for name in CHOICES if open_[name]] if asked.adaptive and can_adapt else []
    length, gamma = asked.num_speculative_tokens, asked.gamma
    if length is None:
        most = _MOST_FIXED_LENGTH if has_fixed_shapes else _MOST_LENGTH
        if asked.kv_offload_gib is not None:
            has_few = max_num_seqs is not None and max_num_seqs <= FEW_REQUESTS
            most = _MOST_LENGTH if has_few else _MOST_OFFLOADED_LENGTH
        length = most if "length" in adapts else FIXED_LENGTH
    if gamma is None:
        is_chosen = "gamma" in adapts and not has_fixed_shapes
        gamma = MOST_GAMMA if is_chosen else FIXED_GAMMA
    return {"num_speculative_tokens": length, "gamma": gamma, "adapts": ",".join(adapts)}


def check_plain(asked: "TriForceConfig", model: str | None) -> None:
    """
    Args:
        asked: with levels that decode plainly.
        model: the key ``model``, a draft model.

    Raises:
        ValueError: vLLM does as much by itself, or a key has no use.
    """
    if asked.kv_offload_gib is None:
        raise ValueError(
            f"levels={asked.levels!r} is plain decoding, which vLLM does by itself; set "
            "kv_offload_gib, or drop method='triforce'"
        )
    names = ("num_speculative_tokens", "gamma", "draft_sources", "prompt_lookup_max", "min_context")
    given = {"model": model} | {name: getattr(asked, name) for name in names}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} with levels={asked.levels!r}: nothing is drafted or proposed "
                "then; leave one of them out"
            )
