"""The frozen target's hidden states, on disk."""

import time
from pathlib import Path

import torch

from .corpus import sequences


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers before which states are taken (vllm/model_executor/models/llama.py)."""
    return 2, num_layers // 2, num_layers - 3


def load_target(target: str):
    """Load the target in float32 for inference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@torch.inference_mode()
def write_states(work: Path, target: str) -> None:
    """Write one file for each sequence that has none: tokens, and states in bfloat16.

    ``aux`` is [num_tokens, 3 * hidden_size], the states before the layers of ``aux_layers()``;
    ``last`` is [num_tokens, hidden_size], what the target's ``lm_head`` reads.
    """
    folder, rows = work / "states", sequences(work)
    folder.mkdir(exist_ok=True)
    model = load_target(target)
    layers = aux_layers(model.config.num_hidden_layers)
    start, num_tokens = time.monotonic(), 0
    for i, row in enumerate(rows):
        path = folder / f"{i:05}.pt"
        if path.exists():
            continue
        tokens = torch.tensor([row["tokens"]])
        output = model.model(tokens, output_hidden_states=True, use_cache=False)
        aux = torch.cat([output.hidden_states[layer][0] for layer in layers], -1)
        state = {
            "tokens": tokens[0].int(),
            "begin": row["begin"],
            "aux": aux.bfloat16(),
            "last": output.last_hidden_state[0].bfloat16(),
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        num_tokens += tokens.numel()
        if i % 16 == 15:
            speed = num_tokens / (time.monotonic() - start)
            print(f"{i + 1} of {len(rows)} sequences, {speed:.0f} tokens/s", flush=True)
