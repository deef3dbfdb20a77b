"""The frozen target's hidden states, on disk or in memory."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from .corpus import sequences

# Tokens that the target reads at a time.
BATCH_TOKENS = {"cpu": 2048, "cuda": 1 << 15}


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers before which states are taken (vllm/model_executor/models/llama.py)."""
    return 2, num_layers // 2, num_layers - 3


def load_target(target: str, device: str = "cpu"):
    """Load the target in float32 for inference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()


@torch.no_grad()
def compute_states(model, rows: list[dict]) -> Iterator[dict]:
    """Yield each sequence's tokens and states, the latter in bfloat16 on the model's device.

    ``aux`` is [num_tokens, 3 * hidden_size], the states before the layers of ``aux_layers()``;
    ``last`` is [num_tokens, hidden_size], what the target's ``lm_head`` reads.
    """
    layers, device = aux_layers(model.config.num_hidden_layers), model.device
    longest = max((len(row["tokens"]) for row in rows), default=1)
    size = max(1, BATCH_TOKENS[device.type] // longest)
    for first in range(0, len(rows), size):
        batch = [torch.tensor(row["tokens"]) for row in rows[first : first + size]]
        # What is padded comes behind, where causal attention does not look.
        tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
        output = model.model(tokens, output_hidden_states=True, use_cache=False)
        aux = torch.cat([output.hidden_states[layer] for layer in layers], -1).bfloat16()
        last = output.last_hidden_state.bfloat16()
        for i, row in enumerate(rows[first : first + size]):
            n = len(row["tokens"])
            yield {
                "kind": row.get("kind", "text"),
                "tokens": tokens[i, :n].int(),
                "begin": row["begin"],
                "aux": aux[i, :n].clone(),
                "last": last[i, :n].clone(),
            }


def write_states(work: Path, target: str, device: str = "cpu") -> None:
    """Write the states of each sequence that has none yet to a file of its own."""
    folder, rows = work / "states", sequences(work)
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:05}.pt" for i in range(len(rows))]
    left = [i for i, path in enumerate(paths) if not path.exists()]
    start, num_tokens = time.monotonic(), 0
    states = compute_states(load_target(target, device), [rows[i] for i in left])
    for i, state in zip(left, states):
        state = {k: v.cpu() if torch.is_tensor(v) else v for k, v in state.items()}
        torch.save(state, paths[i].with_suffix(".part"))
        paths[i].with_suffix(".part").rename(paths[i])
        num_tokens += len(state["tokens"])
        if i % 16 == 15:
            speed = num_tokens / (time.monotonic() - start)
            print(f"{i + 1} of {len(rows)} sequences, {speed:.0f} tokens/s", flush=True)


def read_states(work: Path) -> list[dict]:
    """Read what ``write_states()`` wrote; the tensors stay on disk until they are used."""
    return [torch.load(file, mmap=True) for file in sorted((work / "states").glob("*.pt"))]
