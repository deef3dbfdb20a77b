"""What the levels need of attention on a platform.

Runner V1 asks for ragged passes. It serves on the CPU alone: ``config/checks.py`` refuses it on
any other platform. Runner V2 asks for passes of fixed shapes, on a GPU as CUDA graphs; on the CPU
it runs in tests. So a backend for the CPU is a ``RaggedRetrievalAttention``, any other a
``RetrievalAttention``, and each has a ``DraftAttention``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_triforce.attention.layer_offload import LayerOffload
from vllm_triforce.attention.query_recorder import Recorder
from vllm_triforce.cache.summaries import BlockSummaries, QuantizedSummaries
from vllm_triforce.selection import Summary
from vllm_triforce.vllm_patches import swaps


class RetrievalAttention(ABC):
    """Level 2's attention over chosen blocks, for layers of one geometry.

    Each request is ``num_kv_heads`` sequences of one head, which share its length and have a
    block table each (``cache/one_head_blocks.py``): sequence ``request * num_kv_heads + head``.

    Args:
        layers: vLLM's ``Attention`` layers that retrieve, in the order of the forward pass.
        builder: vLLM's metadata builder of these layers.
        recorder: to be told the queries of every full pass, by the implementation that
            ``attach`` gives each layer.
        offloads: of layers whose KV cache lies in host memory, by name.
    """

    def __init__(
        self,
        layers: list,
        builder,
        recorder: Recorder,
        offloads: Mapping[str, LayerOffload] | None = None,
    ) -> None:
        first = layers[0]
        self._layers = layers
        self._builder = builder
        self.num_kv_heads: int = first.num_kv_heads
        """Read by Runner V2, to lay out its passes."""
        self.query_shape: tuple[int, int, int] = (len(layers), first.num_heads, first.head_size)
        """Of a request's recorded queries; read by Runner V1, to measure what selecting costs."""
        for index, layer in enumerate(layers):
            offload = offloads.get(layer.layer_name) if offloads else None
            self.attach(layer, index, recorder, offload)

    @staticmethod
    @abstractmethod
    def can_retrieve(layer) -> bool:
        """Whether a layer's attention is plain enough to be split into one-head sequences.

        Both runners ask, for each of the target's layers (``core/kv_groups.py``).
        """

    def has_static_metadata(self, builder: Any) -> bool:
        """Whether a metadata builder decides nothing on the host but by shapes: then a graph can
        have what it does.

        Runner V2 asks, for layers that stay dense.
        """
        return False

    @abstractmethod
    def attach(
        self, layer, index: int, recorder: Recorder, offload: LayerOffload | None = None
    ) -> None:
        """Gives a layer an implementation that also takes our metadata (``replace_impl``).

        Args:
            offload: where the layer's KV cache lies in host memory.
        """

    @abstractmethod
    def head_strides(self) -> tuple[int, int]:
        """How a one-head sequence names a block: KV head ``h`` of block ``b`` is
        ``b * per_block + h * per_head``.

        Both runners ask, when they lay out block tables.
        """

    @abstractmethod
    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows * num_kv_heads], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_rows * num_kv_heads, width], int32
    ) -> list[Any]:
        """Metadata of a level 2 pass of ``query_len`` tokens a row, a layer each.

        Runner V2 asks, once for each graph: the tensors are its buffers, which have other
        contents whenever the graph is replayed.
        """

    @abstractmethod
    def update_summaries(
        self,
        summaries: Mapping[Summary, QuantizedSummaries],
        tables: torch.Tensor,  # [num_reqs, width], int32, block tables
        first: torch.Tensor,  # [num_reqs], int32, logical block to begin with
        last: torch.Tensor,  # [num_reqs], int32, logical block to stop before
        max_blocks: int,
    ) -> None:
        """Summarises blocks that became full, at most ``max_blocks`` of a request.

        Runner V2 asks, before it selects.
        """


class RaggedRetrievalAttention(RetrievalAttention):
    """With what Runner V1 needs beside; what Runner V2 needs is made of it."""

    @abstractmethod
    def build(
        self,
        query_lens: torch.Tensor,  # [num_reqs], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_reqs * num_kv_heads, width], int32
    ) -> list[Any]:
        """Metadata of one level 2 pass, a layer each. Runner V1 asks, before every pass."""

    @abstractmethod
    def block_summaries(self) -> BlockSummaries:
        """For each layer, a function from block ids [n] and a kind to
        [n, num_kv_heads, head_dim]. Runner V1 asks once (``cache/summaries.py``)."""

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,
        block_tables: Sequence[torch.Tensor],
    ) -> list[Any]:
        query_lens = torch.full((num_rows,), query_len, dtype=torch.int32, device=seq_lens.device)
        return self.build(query_lens, seq_lens[:: self.num_kv_heads].contiguous(), block_tables)

    def update_summaries(
        self,
        summaries: Mapping[Summary, QuantizedSummaries],
        tables: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        max_blocks: int,
    ) -> None:
        ranges = zip(tables, first.tolist(), last.tolist())
        block_ids = torch.cat([table[a:b] for table, a, b in ranges]).to(torch.int64)
        for kind, written in summaries.items():
            for layer, of_blocks in enumerate(self.block_summaries()):
                written.write(layer, block_ids, of_blocks(block_ids, kind).transpose(0, 1))


class DraftAttention(ABC):
    """Passes of level 1's draft over its private cache, for Runner V2. (Runner V1 has vLLM's own
    builder make them: ``host/streaming.py``.)

    Args:
        layers: the draft's ``Attention`` layers by name, which have their cache by now.
        builder: vLLM's metadata builder of these layers.

    Raises:
        ValueError: the draft's attention is not plain.
    """

    def __init__(self, layers: dict, builder) -> None:
        self.layer_names = list(layers)
        """For a pass's slots, of which each layer has its own."""
        self._builder = builder

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows], int32
        block_table: torch.Tensor,  # [num_rows, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, Any]:
        """Metadata by layer of a pass of ``query_len`` tokens a row, once for each graph."""
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=seq_lens.device)
        return self.ragged(starts * query_len, seq_lens, block_table, max_seq_len)

    @abstractmethod
    def ragged(
        self,
        query_start_loc: torch.Tensor,  # [num_reqs + 1], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
        block_table: torch.Tensor,  # [num_reqs, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, Any]:
        """Metadata by layer of a pass that reads whole windows (``WindowRebuild``)."""


def replace_impl(layer, impl_cls: type, **own: Any) -> None:
    """Puts a subclass in the place of a layer's implementation; its settings are taken over.

    Args:
        impl_cls: of the class that the layer has.
        own: further attributes, for the subclass alone.
    """
    impl: Any = object.__new__(impl_cls)
    impl.__dict__.update(layer.impl.__dict__, **own)
    swaps.LAYER_IMPL.set(layer, impl)
