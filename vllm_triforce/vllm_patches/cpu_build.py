"""Workarounds for two faults of vLLM's CPU build; see patches/README.md.

- ``expand_kernel`` loses its output for dtypes other than int64. Remove when the oldest supported
  vLLM writes the output back.
- An engine cannot start in a process that has loaded numba. Remove when the oldest supported vLLM
  checks that ``vars()`` returned a dict.
"""

import builtins
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_triforce.vllm_patches import swaps

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand_kernel_works() -> bool:
    """True if ``expand_batch_to_tokens`` repeats float and int32 rows correctly."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in (torch.tensor([0.25, 0.75]), torch.tensor([3, 5], dtype=torch.int32)):
        expanded = expand_batch_to_tokens(values, ends, 3)
        if not torch.equal(expanded, values[[0, 0, 1]]):
            return False
    return True


def fix_expand_kernel() -> bool:
    """Replace the kernel on a CPU if the self-check fails; idempotent.

    With vLLM's kernel, speculative sampling divides by uninitialised temperatures.

    Returns:
        True if this call replaced it.

    Raises:
        RuntimeError: the replacement fails the self-check too.
    """
    if not current_platform.is_cpu() or expand_kernel_works():
        return False
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    # vLLM registers its function again for each engine of a process.
    swaps.EXPAND_KERNEL.set(cpu_triton_utils, _expand)
    register_kernels({_KERNEL: _expand})
    if not expand_kernel_works():
        raise RuntimeError(
            f"{_KERNEL} gives wrong results and could not be replaced; speculative sampling "
            "would be wrong. Use another vLLM version."
        )
    return True


def _expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """Repeat each request's value for its tokens, as vLLM's kernel of this name should."""
    expanded, start = output.numpy(), 0
    for value, end in zip(input_val.tolist(), cu_num_tokens.tolist()):
        expanded[start:end] = replace_to if value == replace_from else value
        start = end


def fix_kernel_rebinding() -> None:
    """Let vLLM's CPU build scan all loaded modules if llvmlite is among them; idempotent.

    To replace kernels, vLLM reads ``vars(value).get("kernel")`` for every value of every module.
    numba, loaded by ``ngram``, brings ``llvmlite.binding.ffi.lib``. That object returns a foreign
    function for any name, ``__dict__`` too, and that has no ``get``.
    """
    from vllm.triton_utils import dispatcher

    if current_platform.is_cpu():
        swaps.DISPATCHER_VARS.set(dispatcher, _vars)


def _vars(value: Any) -> dict:
    """Return ``vars(value)``, or an empty dict if that is no dict."""
    attributes = builtins.vars(value)
    return attributes if hasattr(attributes, "get") else {}
