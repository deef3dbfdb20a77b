"""Print registers and spills of the kernels for KV in host memory, compiled for several GPUs.

Run it under the emulation (``make emulated-gpu`` sets it up). Nothing is launched:

    PYTHONPATH=tools/gpu_emulation EMULATED/venv/bin/python -m emu tools/kernel_resources.py

Each line has a kernel, its variant, and by compute capability the registers of a thread and the
bytes of its spill stores and loads, as ptxas reports them.
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from emu import triton_jit
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver, jit

from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.kernels.offload import RetrievalPool, stage_blocks
from vllm_triforce.kernels.retrieval import KeyPointers, update_chunk_summaries
from vllm_triforce.kernels.rows import RowLimits, Rows
from vllm_triforce.metrics.counters import DeviceCounter
from vllm_triforce.selection import Summary

CAPABILITIES = (80, 89, 90)
HEADS, HEAD_SIZE = 8, 128
BUDGETS = {16: (4096, 16384), 32: (4096,), 64: (8192,)}  # by block size
DTYPES = (torch.bfloat16, torch.uint8)
GAMMA, LENGTH = 2, 16
ROWS, VOCAB_SIZE = 4, 128_256

usage: dict[tuple[str, str], dict[int, str]] = {}
capability = CAPABILITIES[0]
variant = ""


def resources(ptx: str) -> str:
    arch = sm_arch_from_capability(capability)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        ptxas = get_ptxas(capability).path
        command = [ptxas, "-v", f"--gpu-name={arch}", source.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)[1]
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return f"{registers}, {int(stores) + int(loads)}"


def compile_alone(kernel, *args, grid, warmup, **kwargs) -> None:
    compiled = triton_jit._compile(kernel, *args, grid=grid, warmup=True, **kwargs)
    by_capability = usage.setdefault((kernel.fn.__name__, variant), {})
    by_capability[capability] = resources(compiled.asm["ptx"])


def launch_all(block_size: int, dtype: torch.dtype, budget: int) -> None:
    """Launch each kernel with arguments of an 8B model's types and sizes."""
    device = torch.device("cpu")
    cache = torch.zeros(2, block_size, HEADS, 2 * HEAD_SIZE, dtype=dtype).transpose(1, 2)
    tables = torch.zeros(ROWS, 1024, dtype=torch.int32)
    lens = torch.zeros(ROWS, dtype=torch.int32)
    counters = torch.zeros(len(DeviceCounter), dtype=torch.int64)
    name(block_size, dtype, "all")
    stage_blocks(cache, cache, tables, lens, block_size, counters)
    name(block_size, dtype, f"budget {budget}")
    max_selected, width = budget // block_size, (budget + 64) // block_size
    limits = RowLimits(0, block_size, RetrievalBudget(0, 0, 0), 0)
    rows = Rows(ROWS, LENGTH, GAMMA, VOCAB_SIZE, limits, device)
    rows.num_rows = ROWS
    blocks = cache[:1].expand(ROWS * width, -1, -1, -1)
    strides = (block_size * HEADS, 1)
    pool = RetrievalPool([cache], [blocks], 0, width, strides, max_selected, counters, rows)
    pool.begin(torch.zeros(1, ROWS * HEADS, width, dtype=torch.int32))
    keys = cache.transpose(1, 2)[..., :HEAD_SIZE]
    if dtype == torch.uint8:
        keys = keys.view(torch.float8_e4m3fn)
    summaries = QuantizedSummaries.allocate((1, HEADS, 2, HEAD_SIZE), device)
    for kind in Summary:
        name(block_size, dtype, kind.name.lower())
        update_chunk_summaries(KeyPointers([keys], [1.0]), kind, summaries, tables, lens, lens, 4)


def name(block_size: int, dtype: torch.dtype, part: str) -> None:
    global variant
    variant = f"{block_size} tokens, {str(dtype).removeprefix('torch.')}, {part}"


def main() -> None:
    global capability
    jit.JITFunction.run = compile_alone
    for capability in CAPABILITIES:
        target = GPUTarget("cuda", capability, 32)
        driver.active.get_current_target = lambda target=target: target
        for block_size, dtype in product(BUDGETS, DTYPES):
            if capability < 89 and dtype == torch.uint8:
                continue
            for budget in BUDGETS[block_size]:
                for kernel in _kernels():
                    kernel.device_caches.clear()
                launch_all(block_size, dtype, budget)
    print("| kernel | variant | " + " | ".join(f"sm_{number}" for number in CAPABILITIES) + " |")
    print("|---" * (2 + len(CAPABILITIES)) + "|")
    for (kernel, name_of_variant), by_capability in sorted(usage.items()):
        cells = [by_capability.get(capability, "") for capability in CAPABILITIES]
        print("| " + " | ".join([kernel.strip("_"), name_of_variant, *cells]) + " |")


def _kernels() -> list[jit.JITFunction]:
    from vllm_triforce.kernels import offload
    from vllm_triforce.kernels import retrieval as chunk_summaries

    modules = (chunk_summaries, offload)
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, jit.JITFunction)
    ]


if __name__ == "__main__":
    main()
