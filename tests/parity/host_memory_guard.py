"""Sees whatever reads or writes a KV cache that lies in host memory: on a GPU each such access goes
over PCIe, and few may."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.disturbing import replaced

# What stages layers, what fills level 2's pool, and means of chunks: kernels.
KERNELS = {"_stage_blocks_kernel", "_chunk_summaries_kernel"}
KERNELS |= {"_begin_pool_kernel", "_copy_selected_kernel"}
# And vLLM's own that writes new keys and values there.
OPERATORS = {"_C.cpu_attn_reshape_and_cache"}
# What gives memory as it lies there, and the types that addresses are kept in.
_ATEN = torch.ops.aten
UNINITIALISED = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
ADDRESSES = (torch.int64, torch.uint64)
NO_ADDRESS = 2**62


class HostMemoryGuard(TorchDispatchMode):
    """
    Args:
        memory: where the KV cache is, [num_bytes].
    """

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._begin = memory.data_ptr()
        self._end = self._begin + memory.nbytes
        self._is_launching = self._is_summarising = False
        self.seen: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operators that PyTorch dispatches, and kernels that are launched in the interpreter."""
        from triton.runtime.interpreter import GridExecutor

        from vllm_triforce.attention.base import RaggedRetrievalAttention
        from vllm_triforce.attention.cpu import RetrievalCPUAttentionImpl as Impl

        launch = GridExecutor.__call__
        summarise = RaggedRetrievalAttention.update_summaries

        def launched(executor, *args, **kwargs):
            if any(map(self._is_there, [*args, *kwargs.values()])):
                self.seen.add(executor.fn.__name__)
            before, self._is_launching = self._is_launching, True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._is_launching = before

        def summarising(*args, **kwargs):  # on the CPU with operators of PyTorch
            self._is_summarising = True
            try:
                return summarise(*args, **kwargs)
            finally:
                self._is_summarising = False

        def seen(original):
            """vLLM calls attention within an operator of its own, of which nothing is seen."""

            def method(*args, **kwargs):
                with self:
                    return original(*args, **kwargs)

            return method

        with (
            replaced(GridExecutor, "__call__", launched),
            replaced(RaggedRetrievalAttention, "update_summaries", summarising),
            replaced(Impl, "forward", seen(Impl.forward)),
            replaced(Impl, "do_kv_cache_update", seen(Impl.do_kv_cache_update)),
            self,
        ):
            yield

    def check(self) -> None:
        """
        Raises:
            AssertionError: something reads or writes there that should not, or nothing does.
        """
        assert not (others := self.seen - KERNELS - OPERATORS), f"{others} are in host memory"
        assert self.seen >= OPERATORS | {"_stage_blocks_kernel"}, self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (self._is_launching or self._is_summarising) and not _is_view(func):
            found = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(map(self._is_there, found)):
                self.seen.add(func.name().replace("::", "."))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNINITIALISED and result.dtype in ADDRESSES:
            # Or what lay there before is taken for an address.
            result.fill_(NO_ADDRESS)
        return result

    def _is_there(self, its) -> bool:
        """Whether something is a part of that memory, or addresses of such."""
        if not isinstance(its, torch.Tensor):
            return False
        if self._begin <= its.data_ptr() < self._end:
            return its.numel() > 0
        if its.dtype not in ADDRESSES or not 0 < its.numel() <= 64:
            return False
        with torch.utils._python_dispatch._disable_current_modes():
            return any(self._begin <= value < self._end for value in its.flatten().tolist())


def _is_view(func) -> bool:
    """Whether an operator only gives a tensor over the same memory."""
    returns = func._schema.returns
    return bool(returns) and all(
        its.alias_info is not None and not its.alias_info.is_write for its in returns
    )
