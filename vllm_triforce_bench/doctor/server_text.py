"""A server's figures as lines for a terminal."""

from collections.abc import Iterator
from typing import Any

from vllm_triforce_bench.doctor.text import line


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Print the results of ``examine_server()``."""
    seconds = results["seconds"]
    period = f"{seconds:g} seconds" if seconds else "all since its start"
    yield line("server", f"{results['url']}, {period}")
    for model in results["models"]:
        yield ""
        yield from _model(model)


def _model(model: dict[str, Any]) -> Iterator[str]:
    yield line("model", model["model"])
    yield line(
        "requests",
        f"{model['running']:.0f} running, {model['waiting']:.0f} waiting; "
        f"{model['kv_cache_usage']:.0%} of the KV cache used",
    )
    if (length := model["mean_prompt_tokens"]) is not None:
        yield line("prompts", f"{length:,.0f} tokens in the mean")
    yield line("generated", f"{model['generated_tokens']:,.0f} tokens")
    if model["levels"] is not None:
        yield from _levels(model, model["levels"])
    for advice in model["advice"] or ["nothing to change"]:
        yield line("advice", advice)


def _levels(model: dict[str, Any], levels: dict[str, Any]) -> Iterator[str]:
    yield line(
        "speculation",
        f"{model['accepted_share']:.0%} of these were proposed and accepted: "
        f"{model['tokens_per_full_pass']:.2f} tokens for each full pass of a request",
    )
    if not levels["num_proposals"]:
        return
    direct = levels["num_direct_proposals"] / levels["num_proposals"]
    length = levels["num_proposed"] / levels["num_proposals"]
    yield line("proposals", f"{length:.1f} tokens each; {direct:.0%} straight to the full pass")
    accepted = levels["num_level2_accepted"]
    tested = accepted + levels["num_level3_rejections"]
    yield line(
        "full pass",
        f"accepts {levels['level2_acceptance_per_test']:.3f} of the tokens it tests "
        f"({accepted:,} of {tested:,})",
    )
    if drafted := levels["num_level1_drafted"]:
        yield line(
            "level 2",
            f"accepts {levels['level1_acceptance_rate']:.3f} of level 1's tokens "
            f"({levels['num_level1_accepted']:,} of {drafted:,})",
        )
    seconds = levels["time_seconds"]
    parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
    yield line("proposing", f"{sum(seconds.values()):.1f} s ({parts})")
