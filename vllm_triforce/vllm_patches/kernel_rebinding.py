"""vLLM's CPU build cannot start an engine in a process that has loaded numba; patches/README.md.

Remove when the oldest supported vLLM checks that what ``vars()`` gives is a dict.
"""

import builtins
from typing import Any

from vllm_triforce.vllm_patches import swaps


def fix_kernel_rebinding() -> None:
    """Lets vLLM look through all loaded modules where one of them answers anything; idempotent.

    To replace kernels, vLLM reads ``vars(value).get("kernel")`` of every value of every module.
    numba, which ``ngram`` and ``verification/top_p_rows.py`` load, brings
    ``llvmlite.binding.ffi.lib``: it makes a foreign function of any name that it is asked for,
    ``__dict__`` too, and that has no ``get``.
    """
    from vllm.triton_utils import dispatcher

    swaps.DISPATCHER_VARS.set(dispatcher, _vars)


def _vars(value: Any) -> dict:
    found = builtins.vars(value)
    return found if hasattr(found, "get") else {}
