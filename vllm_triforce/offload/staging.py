"""Layers in host memory as a full pass reads them: one after the other, on the device."""

from functools import partial

import torch

from vllm_triforce.kernels.stage_blocks import Part, stage_blocks
from vllm_triforce.offload.side_stream import SideStream

# Block tables, lengths, and where each request's tokens begin.
Reads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Staging:
    """Copies of layers, each of which has the shape of one layer's cache and the same block ids, so
    that block tables, slots and attention's metadata stay vLLM's.

    With two buffers the next layer is copied while attention and what follows run over this one, as
    far as it can be: blocks that the pass itself writes to, it writes only when it comes to that
    layer. Those are copied then, behind the others, and so over whatever a copy ahead has made of
    them: a request may read, as computed, blocks that another one of the same batch fills
    (vLLM's prefix cache knows a block once it is scheduled).

    Args:
        hosts: of each layer in host memory, its KV cache, [num_blocks, num_kv_heads, block_size,
            size], in the order in which passes read them.
        buffers: on the device, the same shape, one or two.
        counters: [len(DeviceCounter)], int64, added to.
        side: where copies ahead run; None to copy none ahead, as with one buffer.
    """

    def __init__(
        self,
        hosts: list[torch.Tensor],
        buffers: list[torch.Tensor],
        counters: torch.Tensor,
        side: SideStream | None,
    ) -> None:
        self.buffers = buffers
        self._hosts = hosts
        self._counters = counters
        self._side = side if len(buffers) > 1 else None
        # What is copied ahead: a layer's number, for the pass with these lengths.
        self._ahead: tuple[int, torch.Tensor] | None = None

    def staged(
        self,
        number: int,  # of the layer
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
        query_start_loc: torch.Tensor,  # [num_reqs + 1], int32
    ) -> torch.Tensor:
        """The layer's KV cache on the device, as far as these requests read it. The pass has
        written its own keys and values to host memory before."""
        reads = block_table, seq_lens, query_start_loc
        buffer = self.buffers[number % len(self.buffers)]
        part = Part.ALL
        if self._ahead is not None and self._ahead[0] == number and self._ahead[1] is seq_lens:
            part = Part.NEW
        self.join()
        self._stage(number, reads, part)
        if self._side is not None and number + 1 < len(self._hosts):
            # Its buffer was read by the layer before this one, whose attention is launched.
            self._side.run(partial(self._stage, number + 1, reads, Part.COMPUTED))
            self._ahead = number + 1, seq_lens
        return buffer

    def join(self) -> None:
        """Waits for what is copied ahead, if anything is. A pass that is left half way leaves some,
        and a CUDA graph that is replayed next does not know of it."""
        if self._ahead is not None:
            assert self._side is not None
            self._side.join()
            self._ahead = None

    def _stage(self, number: int, reads: Reads, part: Part) -> None:
        host, buffer = self._hosts[number], self.buffers[number % len(self.buffers)]
        stage_blocks(host, buffer, *reads, host.shape[2], self._counters, part)


class HostLayer:
    """What attention reads in the place of one layer in host memory
    (``attention/base.py``).

    Args:
        number: among the layers in host memory.
        pool: [num_slots * width, num_kv_heads, block_size, size], what level 2 reads and writes;
            None where it never runs.
    """

    def __init__(self, staging: Staging, number: int, pool: torch.Tensor | None) -> None:
        self.staged = partial(staging.staged, number)
        self.pool = pool
