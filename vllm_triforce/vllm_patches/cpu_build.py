"""vLLM's CPU ``expand_kernel`` loses its output for anything but int64; see patches/README.md.

Remove when the oldest supported vLLM writes the output back.

vLLM's CPU build cannot start an engine in a process that has loaded numba; patches/README.md.

Remove when the oldest supported vLLM checks that what ``vars()`` gives is a dict.
"""

import builtins
from typing import Any

import torch

from vllm_triforce.vllm_patches import swaps

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand_kernel_works() -> bool:
    """Self-check: does ``expand_batch_to_tokens`` repeat float and int32 rows?"""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in (torch.tensor([0.25, 0.75]), torch.tensor([3, 5], dtype=torch.int32)):
        expanded = expand_batch_to_tokens(values, ends, 3)
        if not torch.equal(expanded, values[[0, 0, 1]]):
            return False
    return True


def fix_expand_kernel() -> bool:
    """Replaces the kernel where the self-check fails; idempotent.

    Without it, speculative sampling divides by uninitialised temperatures.

    Returns:
        Whether it was replaced now.

    Raises:
        RuntimeError: the replacement does not pass the self-check either.
    """
    if expand_kernel_works():
        return False
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    # vLLM registers its own function again with every engine of a process.
    swaps.EXPAND_KERNEL.set(cpu_triton_utils, _expand)
    register_kernels({_KERNEL: _expand})
    if not expand_kernel_works():
        raise RuntimeError(
            f"{_KERNEL} gives wrong results and could not be replaced; speculative sampling "
            "would be wrong. Use another vLLM version"
        )
    return True


def _expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    expanded, start = output.numpy(), 0
    for value, end in zip(input_val.tolist(), cu_num_tokens.tolist()):
        expanded[start:end] = replace_to if value == replace_from else value
        start = end


def fix_kernel_rebinding() -> None:
    """Lets vLLM look through all loaded modules where one of them answers anything; idempotent.

    To replace kernels, vLLM reads ``vars(value).get("kernel")`` of every value of every module.
    numba, which ``ngram`` and ``runner_v1/top_p_rows.py`` load, brings
    ``llvmlite.binding.ffi.lib``: it makes a foreign function of any name that it is asked for,
    ``__dict__`` too, and that has no ``get``.
    """
    from vllm.triton_utils import dispatcher

    swaps.DISPATCHER_VARS.set(dispatcher, _vars)


def _vars(value: Any) -> dict:
    found = builtins.vars(value)
    return found if hasattr(found, "get") else {}
