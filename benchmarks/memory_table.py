"""Print the GPU memory that TriForce takes: bytes of each buffer, and CUDA graphs by kind.

For Llama-3.1-8B, without a draft and with Llama-3.2-1B, at several ``max_num_seqs``. Computed by
the functions by which the worker reserves memory, and by vLLM's choice of graphs.

    python benchmarks/memory_table.py
"""

from types import SimpleNamespace

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_triforce.config import TriForceConfig
from vllm_triforce.runner_v2.decode_graphs import (
    add_plain_decode_graphs,
    serve_any_mix,
    thin_decode_graphs,
)
from vllm_triforce.runner_v2.graph_sizes import num_graphs
from vllm_triforce.worker.memory import buffer_bytes, summary_bytes_per_kv_byte

MAX_NUM_SEQS = (64, 256, 1024)
BLOCK_SIZE = 16
VOCAB_SIZE = 128_256
TARGET = {f"target.{i}": (32, 8, 128) for i in range(32)}
DRAFT = {f"draft.{i}": (32, 8, 64) for i in range(16)}
# A GPU of 80 GB at vLLM's default share, less weights, activations and vLLM's graphs.
KV_BYTES = 53 * 2**30
# A graph takes 6 to 28 MiB by vLLM's logs.
GRAPH_BYTES = 10 * 2**20


def captured(max_num_seqs: int, num_drafts: int) -> tuple[CudaGraphManager, SimpleNamespace]:
    """Return vLLM's graph manager with the sizes that vLLM chooses on a GPU, and the config."""
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        post_init_cudagraph_sizes=lambda: None,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=False,
            dtype=torch.bfloat16,
            head_dtype=torch.bfloat16,
            max_model_len=131_072,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", use_kda_recoverssm=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        speculative_config=None,
        performance_mode="balanced",
        uniform_decode_query_len=1 + num_drafts,
        use_v2_model_runner=True,
    )
    VllmConfig._set_cudagraph_sizes(config)
    manager = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, compilation
    manager.max_num_reqs, manager.cudagraph_mode = max_num_seqs, compilation.cudagraph_mode
    manager.decode_query_len, manager.varlen_decode = 1 + num_drafts, False
    manager.ubatch_runner, manager.lora_capture_cases = None, [0]
    manager._lora_dispatch_map, manager._max_lora_case = {}, 0
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    return manager, config


def graphs(max_num_seqs: int, config, has_draft: bool) -> dict[str, int]:
    """Count CUDA graphs by kind."""
    manager, vllm_config = captured(max_num_seqs, config.num_speculative_tokens)
    serve_any_mix(manager)
    thin_decode_graphs(manager)
    add_plain_decode_graphs(manager)
    full = manager._capture_descs[CUDAGraphMode.FULL]
    plain = sum(desc.uniform_token_count == 1 for desc in full)
    return {
        "piecewise": len(manager._capture_descs[CUDAGraphMode.PIECEWISE]),
        "plain decoding": plain,
        "verifying drafts": len(full) - plain,
        **num_graphs(
            config,
            min(max_num_seqs, config.max_speculating_seqs),
            vllm_config.compilation_config.max_cudagraph_capture_size,
            has_draft,
        ),
    }


def num_stock_graphs(max_num_seqs: int) -> int:
    manager, _ = captured(max_num_seqs, 0)
    return sum(map(len, manager._capture_descs.values()))


def column(max_num_seqs: int, has_draft: bool) -> dict[str, str]:
    """Compute one column of the table."""
    config = (
        TriForceConfig().with_defaults(can_adapt=True, has_fixed_shapes=True).resolve(BLOCK_SIZE)
    )
    _, vllm_config = captured(max_num_seqs, config.num_speculative_tokens)
    layers, drafts = (
        {
            name: SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_size=size)
            for name, (heads, kv_heads, size) in shape.items()
        }
        for shape in (TARGET, DRAFT if has_draft else {})
    )
    parts = buffer_bytes(layers, drafts, config, vllm_config)
    parts["chunk summaries"] = int(
        KV_BYTES * summary_bytes_per_kv_byte(layers, config, vllm_config)
    )
    counts, stock = graphs(max_num_seqs, config, has_draft), num_stock_graphs(max_num_seqs)
    parts["CUDA graphs beyond stock vLLM's"] = GRAPH_BYTES * (sum(counts.values()) - stock)
    num_bytes = sum(parts.values())
    return {
        **{f"{name}, MiB": f"{size / 2**20:,.0f}" for name, size in parts.items()},
        "**together, MiB**": f"**{num_bytes / 2**20:,.0f}**",
        "**of the KV cache**": f"**{num_bytes / KV_BYTES:.1%}**",
        **{f"graphs: {name}": str(count) for name, count in counts.items()},
        "**graphs together, stock's**": f"**{sum(counts.values())}, {stock}**",
    }


def table() -> str:
    """Return the table in Markdown."""
    columns = {
        f"{seqs}, {'with' if has_draft else 'no'} draft": column(seqs, has_draft)
        for has_draft in (False, True)
        for seqs in MAX_NUM_SEQS
    }
    names = list(dict.fromkeys(name for each in columns.values() for name in each))
    # Rows that only engines with a draft have come before the sums.
    names.sort(key=lambda name: ("graphs" in name and "MiB" not in name, name.startswith("**")))
    lines = ["| `max_num_seqs` | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(c.get(name, "0") for c in columns.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
