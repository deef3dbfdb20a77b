"""Sees whatever reads or writes a KV cache that lies in host memory: on a GPU each such access goes
over PCIe, and few may."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.disturbing import replaced

# What stages layers. Kernels that copy selected blocks and summarize chunks get addresses.
KERNELS = {"_stage_blocks_kernel"}
# vLLM's own that writes new keys and values there.
OPERATORS = {"_C.cpu_attn_reshape_and_cache"}


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
        assert self.seen >= OPERATORS | KERNELS, self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (self._is_launching or self._is_summarising) and not _is_view(func):
            found = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(map(self._is_there, found)):
                self.seen.add(func.name().replace("::", "."))
        return func(*args, **(kwargs or {}))

    def _is_there(self, its) -> bool:
        """Whether something is a tensor over that memory."""
        if not isinstance(its, torch.Tensor) or its.numel() == 0:
            return False
        return self._begin <= its.data_ptr() < self._end


def _is_view(func) -> bool:
    """Whether an operator only gives a tensor over the same memory."""
    returns = func._schema.returns
    return bool(returns) and all(
        its.alias_info is not None and not its.alias_info.is_write for its in returns
    )
