"""Sizes and numbers of the CUDA graphs of proposals."""

from collections.abc import Callable
from functools import cache

import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING

# Rows of rounds that are captured as a whole. Larger rounds launch pass by pass: launches are a
# small part of their time, and a graph of the round would keep its logits in memory.
ROUND_ROWS = (1, 2, 4, 8, 16)
MAX_ROWS = ROUND_ROWS[-1]


def round_sizes(max_rows: int, capture_limit: int) -> list[int]:
    """Return the numbers of rows that rounds of at most ``max_rows`` are captured for.

    ``capture_limit`` is the largest size that vLLM captures, in tokens.
    """
    max_size = min(max_rows, MAX_ROWS, capture_limit)
    return sorted({size for size in ROUND_ROWS if size < max_size} | {max_size})


def pass_sizes(max_rows: int, capture_limit: int) -> list[int]:
    """Return the numbers of rows that single passes are captured for, above those of rounds.

    Sizes double: up to some hundred tokens a pass takes as long as reading the weights.
    """
    sizes = {max_rows}
    size = 2 * MAX_ROWS
    while size < max_rows:
        sizes.add(size)
        size *= 2
    return sorted(size for size in sizes if MAX_ROWS < size <= capture_limit)


def num_graphs(
    config: ResolvedConfig,
    max_rows: int,
    capture_limit: int,
    has_draft: bool,
    num_lora_cases: int = 0,
) -> dict[str, int]:
    """Count the graphs of proposals that run a model, by kind.

    Args:
        num_lora_cases: numbers of adapters that level 2's passes are captured for; 0 without LoRA.
    """
    rounds = len(round_sizes(max_rows, capture_limit))
    passes = len(pass_sizes(max_rows, capture_limit))
    # There are rounds with and without selection. The graphs of logits are not counted: they have a
    # few dozen kernels, where a pass has hundreds.
    level2 = {"level 2 rounds": 2 * rounds, "level 2 passes": passes}
    if num_lora_cases:
        level2 = {"level 2 passes": num_lora_cases * (rounds + passes)}
    if not config.uses_level2:
        level2 = {}
    if not has_draft:
        return level2
    lengths = {config.num_speculative_tokens + 1, config.gamma + 1}
    if config.gamma > 1:
        lengths.add(1)
    return level2 | {
        "level 1 rounds": len(CAPTURED_SAMPLING) * rounds,
        "level 1 passes": len(lengths) * passes,
    }


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all graphs are captured on.

    PyTorch reuses memory and cuBLAS workspaces by stream, so graphs of one stream share both.
    """
    return torch.cuda.Stream(device=device)


def on_capture_stream(device: torch.device, run: Callable[[], None]) -> None:
    """Run a warm-up on the capture stream, after the current stream's work."""
    stream, current = capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)
