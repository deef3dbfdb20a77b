"""How many CUDA graphs there are of a proposal, and for how many rows each."""

from collections.abc import Callable
from functools import cache

import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING

# Rounds of so many rows are captured as a whole; larger ones launch pass by pass: theirs take
# long, and a graph keeps its logits.
ROUND_ROWS = (1, 4, 16)
MAX_ROWS = ROUND_ROWS[-1]


def round_sizes(max_rows: int, largest: int) -> list[int]:
    """
    Args:
        max_rows: of a batch.
        largest: that vLLM captures.
    """
    most = min(max_rows, MAX_ROWS, largest)
    return sorted({size for size in ROUND_ROWS if size < most} | {most})


def pass_sizes(max_rows: int, largest: int) -> list[int]:
    """Twice as many rows each time, above those of rounds: up to some hundred tokens a pass
    takes as long as reading the weights does."""
    sizes = {max_rows}
    size = 2 * MAX_ROWS
    while size < max_rows:
        sizes.add(size)
        size *= 2
    return sorted(size for size in sizes if MAX_ROWS < size <= largest)


def num_graphs(
    config: ResolvedConfig, max_rows: int, largest: int, has_draft: bool, num_lora_cases: int = 0
) -> dict[str, int]:
    """Graphs that are captured of proposals, by kind.

    Args:
        max_rows, largest: of ``round_sizes``.
        num_lora_cases: for which level 2's passes are captured; 0 without LoRA.
    """
    rounds, passes = len(round_sizes(max_rows, largest)), len(pass_sizes(max_rows, largest))
    of_level2 = {"level 2 rounds": len(CAPTURED_SAMPLING) * rounds, "level 2 passes": passes}
    if num_lora_cases:
        of_level2 = {"level 2 passes": num_lora_cases * (rounds + passes)}
    if not config.uses_level2:
        of_level2 = {}
    if not has_draft:
        return of_level2
    lengths = {config.num_speculative_tokens + 1, config.gamma + 1}
    if config.gamma > 1:
        lengths.add(1)
    return of_level2 | {
        "level 1 rounds": len(CAPTURED_SAMPLING) * rounds,
        "level 1 passes": len(lengths) * passes,
    }


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which all of them are captured.

    PyTorch reuses memory, and keeps a workspace of cuBLAS, by stream: on streams of their own
    graphs would share neither.
    """
    return torch.cuda.Stream(device=device)


def on_capture_stream(device: torch.device, run: Callable[[], None]) -> None:
    """As what is captured there afterwards."""
    stream, current = capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)
