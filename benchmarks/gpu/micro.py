"""Time the parts of a level 2 pass by themselves, in CUDA graphs; print JSON.

    python -m benchmarks.gpu.micro OUT.json

Shapes are Llama-3.1-8B's. ``--small`` has tiny ones, to rehearse on the emulated GPU.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import linear

from benchmarks.gpu.engines import leave_out_mask_kernel
from benchmarks.gpu.models import MODELS, SMOKE
from benchmarks.gpu.selection_times import SHAPES, graph_us, selection_us
from vllm_triforce.attention.gpu.paged_kernels import FlashAttention, SparseSequences
from vllm_triforce.runner_v2.sampling import masked_logits

DEVICE, DTYPE, BLOCK = "cuda", torch.bfloat16, 16
# Requests and tokens of each; level 2 reads BUDGET tokens.
PASSES, BUDGET = ((1, 3), (1, 5), (4, 3), (8, 3), (8, 5)), 4096
SMALL_SHAPES = ((2, 2, 40, 1),)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def node_us() -> float:
    """Time a kernel that waits for the one before it."""
    x = torch.zeros(4096, device=DEVICE)
    return graph_us(lambda: x.add_(1), 1000)


def linear_us(model) -> dict[str, dict[int, float]]:
    """Time each linear layer, by tokens of the pass; four layers follow one another."""
    width = model.head_dim * (model.heads + 2 * model.kv_heads)
    shapes = {
        "qkv": (width, model.hidden),
        "o": (model.hidden, model.head_dim * model.heads),
        "gate_up": (2 * model.inner, model.hidden),
        "down": (model.hidden, model.inner),
    }
    result = {}
    for name, (rows, columns) in shapes.items():
        weights = [tensor(rows, columns) for _ in range(4)]
        result[name] = {
            num_tokens: graph_us(partial(_multiply, tensor(num_tokens, columns), weights), 4) / 4
            for num_tokens in (1, 3, 5, 7, 16, 48)
        }
    return result


def _multiply(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        linear(x, weight)


def attention_us(model, num_reqs: int, length: int, budget: int) -> float:
    """Time level 2's attention in a layer, without selection and the copies around it."""
    heads, dim = model.kv_heads, model.head_dim
    num_seqs, width = num_reqs * heads, budget // BLOCK
    cache = tensor(num_seqs * width, BLOCK, 1, 2 * dim)
    sequences = SparseSequences(
        torch.arange(num_seqs + 1, device=DEVICE, dtype=torch.int32) * length,
        torch.full((num_seqs,), budget, device=DEVICE, dtype=torch.int32),
        torch.randperm(num_seqs * width, device=DEVICE).int().view(num_seqs, width),
        length,
        budget,
    )
    one = torch.ones(1, 1, device=DEVICE)
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    impl = SimpleNamespace(scale=dim**-0.5, sliding_window=(-1, -1))
    query = tensor(num_seqs * length, model.heads // heads, dim)
    keys, values = cache.split(dim, -1)
    output, attend = torch.empty_like(query), FlashAttention(3)

    def run() -> None:  # with FlashAttention 3's schedule, which layers of a pass share
        attend(layer, impl, query, keys, values, replace(sequences, schedules={}), output)

    return graph_us(run)


def masks_us(rows: int, vocab: int) -> dict[str, float]:
    """Time the treatment of sampled logits: of any request, of one without masks, and argmax."""
    logits, one = tensor(rows, vocab), torch.ones(rows, device=DEVICE)
    top_k = torch.full((rows,), vocab, device=DEVICE, dtype=torch.int32)
    zero = torch.zeros_like(one)
    return {
        "any": graph_us(lambda: masked_logits(logits, one, top_k, one, zero), 8),
        "no masks": graph_us(lambda: masked_logits(logits, one), 8),
        "argmax": graph_us(lambda: logits.max(-1), 8),
    }


def measure(is_small: bool) -> dict:
    if is_small:
        leave_out_mask_kernel()
    model, budget = (SMOKE, 64) if is_small else (MODELS["llama-3.1-8b"], BUDGET)
    return {
        "device": torch.cuda.get_device_name(),
        "unit": "microseconds",
        "node of a graph": node_us(),
        "linear layers, by tokens": linear_us(model),
        "attention of level 2, by requests x tokens": {
            f"{reqs} x {length}": attention_us(model, reqs, length, budget)
            for reqs, length in PASSES
        },
        "selection, by KV heads, query heads of each, chunks, requests": {
            str(shape): selection_us(*shape) for shape in (SMALL_SHAPES if is_small else SHAPES)
        },
        "masks, by rows": {rows: masks_us(rows, model.vocab) for rows in (3, 24, 48)},
    }


if __name__ == "__main__":
    with torch.inference_mode():
        text = json.dumps(measure("--small" in sys.argv), indent=1)
    print(text)
    Path(sys.argv[1]).write_text(text + "\n")
