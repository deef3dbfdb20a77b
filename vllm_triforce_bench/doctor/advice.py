"""Advice for a running server, by what its counters say."""

from collections.abc import Iterator
from typing import Any

_FEW_TOKENS = 500
"""Generated or tested tokens below which a share says little."""
_FEW_PROPOSED = 0.05
"""Proposed tokens for each generated one below which decoding is plain."""
_MOSTLY = 0.5
_SHORT_PROMPT = 2000
_LOW_LEVEL1, _LOW_DIRECT, _LOW_LEVEL2 = 0.25, 0.5, 0.85
_MANY_PREEMPTIONS = 10


def advice(figures: dict[str, Any]) -> list[str]:
    """List what the figures of ``server.figures()`` suggest, each with the key to change."""
    if figures["levels"] is None:
        if figures["has_other_method"]:
            return ["another speculative method runs here, not TriForce"]
        return ["TriForce does not run here; start the server with --speculative-model triforce"]
    return [*_of_health(figures), *_of_speculation(figures)]


def _of_health(figures: dict[str, Any]) -> Iterator[str]:
    levels = figures["levels"]
    if levels["num_boundary_faults"]:
        yield "boundary_faults is above 0: see docs/troubleshooting.md; the output is exact"
    if levels["num_nan_requests"]:
        yield "nan_requests is above 0: see docs/troubleshooting.md; the output is not affected"
    if figures["preemptions"] > _MANY_PREEMPTIONS:
        yield (
            f"requests lost their KV cache to others {figures['preemptions']:,.0f} times: lower "
            "max_num_seqs, raise gpu_memory_utilization, or use kv_offload_gib"
        )


def _of_speculation(figures: dict[str, Any]) -> Iterator[str]:
    levels, generated = figures["levels"], figures["generated_tokens"]
    if generated < _FEW_TOKENS:
        yield f"fewer than {_FEW_TOKENS} tokens were generated; ask again after more traffic"
        return
    if levels["num_proposed"] < _FEW_PROPOSED * generated:
        yield _why_plain(figures)
        return
    needed = levels["break_even_tokens"]
    if (
        levels["num_level3_steps"] >= _FEW_TOKENS
        and needed is not None
        and levels["mean_acceptance_length"] < needed
    ):
        yield _BELOW_BREAK_EVEN
    tested = levels["num_level2_accepted"] + levels["num_level3_rejections"]
    is_direct = levels["num_direct_proposals"] > _MOSTLY * levels["num_proposals"]
    low = _LOW_DIRECT if is_direct else _LOW_LEVEL2
    if tested >= _FEW_TOKENS and levels["level2_acceptance_per_test"] < low:
        yield _BETTER_DRAFT.format("full passes reject") if is_direct else _LARGER_BUDGET
    if (
        levels["num_level1_drafted"] >= _FEW_TOKENS
        and levels["level1_acceptance_rate"] < _LOW_LEVEL1
    ):
        yield _BETTER_DRAFT.format("level 2 rejects")


_BELOW_BREAK_EVEN = (
    "speculation takes more time here than its tokens save: leave num_speculative_tokens, gamma "
    "and min_context to the controller, or lower max_slowdown"
)
_LARGER_BUDGET = (
    "full passes reject many tokens of level 2: raise retrieval_budget (each doubling has added "
    "0.02 to 0.03 of acceptance); vllm-triforce lab measures it on your text"
)
_BETTER_DRAFT = (
    "{} most tokens of level 1: name a draft model or an EAGLE-3 head by 'model', or a better one; "
    "if lengths are fixed (adaptive false), let the controller choose them"
)


def _why_plain(figures: dict[str, Any]) -> str:
    length = figures["mean_prompt_tokens"]
    if length is not None and length < _SHORT_PROMPT:
        return (
            f"nearly all tokens are decoded plainly: with prompts of {length:,.0f} tokens the KV "
            "cache is a small part of what a step reads. TriForce is for longer ones"
        )
    return (
        "nearly all tokens are decoded plainly: by the controller's measurements speculation does "
        "not pay for this text and batch. A draft model or an EAGLE-3 head ('model') may change "
        "that, or smaller batches; vllm-triforce bench compares them"
    )
