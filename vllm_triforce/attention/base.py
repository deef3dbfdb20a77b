"""Interface of a platform's attention to the levels of Runner V2.

It runs passes of fixed shapes, on a GPU as CUDA graphs, and in tests on the CPU. Runner V1 runs
ragged passes, of ``attention/cpu.py`` alone: ``config/checks.py`` refuses it elsewhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context

from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.selection import Summary
from vllm_triforce.vllm_patches import swaps


class LayerSelection(Protocol):
    """Selection of chunks inside level 2's pass (``cache/pass_selection.py``)."""

    def select(
        self,
        layer: int,  # index among the layers that retrieve
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> torch.Tensor | None:
        """Write the blocks that a layer selects into its block tables.

        Returns:
            On a GPU the queries by KV head, [num_reqs * num_kv_heads * query_len, group, head_dim].
        """
        ...


@dataclass
class HostLayer:
    """One layer's KV cache in host memory (``offload/cache.py``)."""

    host: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, size], as the device sees it."""
    staging: torch.Tensor
    """The same shape and strides, on the device; shared by all layers."""
    counters: torch.Tensor  # [len(DeviceCounter)], int64, added to
    pool: torch.Tensor | None
    """[num_slots * width, num_kv_heads, block_size, size], blocks that level 2 reads and writes;
    None where level 2 never runs."""

    def stage(
        self,
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
    ) -> torch.Tensor:
        """Copy the blocks that these requests read to the staging layer, and return it.

        The pass has already written this layer's new keys and values to host memory. The staging
        layer has the same block ids, so block tables and attention metadata stay vLLM's.
        """
        from vllm_triforce.kernels.offload import stage_blocks

        block_size = self.host.shape[2]
        # Stream order suffices: the previous layer's attention has read the staging layer by now.
        stage_blocks(self.host, self.staging, block_table, seq_lens, block_size, self.counters)
        return self.staging


class RetrievalAttention(ABC):
    """Level 2's attention over chosen blocks, for layers of one geometry.

    Each request is ``num_kv_heads`` sequences of one head, which share its length and have a
    block table each (``cache/one_head_blocks.py``): sequence ``request * num_kv_heads + head``.

    Args:
        layers: vLLM's ``Attention`` layers that retrieve, in the order of the forward pass.
        builder: vLLM's metadata builder of these layers.
        offloads: KV caches in host memory, by the name of their layer.
    """

    def __init__(
        self,
        layers: list,
        builder,
        offloads: Mapping[str, HostLayer] | None = None,
    ) -> None:
        self.layers = layers
        """Both runners keep summaries in their order."""
        self._builder = builder
        self.num_kv_heads: int = layers[0].num_kv_heads
        """Runner V2 lays out its passes by it."""
        for index, layer in enumerate(layers):
            offload = offloads.get(layer.layer_name) if offloads else None
            self.attach(layer, index, offload)

    @staticmethod
    @abstractmethod
    def can_retrieve(layer) -> bool:
        """True if a layer's attention is plain enough to be split into one-head sequences.

        Both runners check each of the target's layers (``core/kv_groups.py``).
        """

    def has_static_metadata(self, builder: Any) -> bool:
        """True if a metadata builder decides on the host by shapes alone, so that a CUDA graph can
        hold its metadata.

        Runner V2 checks the layers that stay dense.
        """
        return False

    @abstractmethod
    def attach(self, layer, index: int, offload: HostLayer | None = None) -> None:
        """Give a layer an implementation that also takes our metadata (``replace_impl``).

        Args:
            offload: the layer's KV cache, where it lies in host memory.
        """

    @staticmethod
    def chunk_size(block_size: int) -> int:
        """Return the tokens of a retrieval chunk in KV blocks of ``block_size`` tokens."""
        return block_size

    @abstractmethod
    def chunk_ids(self) -> ChunkIds:
        """Return the ids of one-head blocks, by which both runners lay out block tables."""

    @abstractmethod
    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows * num_kv_heads], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_rows * num_kv_heads, width], int32
        selection: LayerSelection | None = None,
    ) -> list[Any]:
        """Return each layer's metadata of a level 2 pass of ``query_len`` tokens a row.

        Runner V2 calls it once for each graph. The tensors are its buffers, whose contents change
        between replays.

        Args:
            selection: each layer calls ``selection.select()``, which writes its block table, before
                it attends. None where the tables are complete.
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
        """Summarize blocks that became full, at most ``max_blocks`` of a request.

        Runner V2 calls it when a proposal begins.
        """


class DraftAttention(ABC):
    """Attention of level 1's draft model over its private cache, for Runner V2.

    Runner V1 uses vLLM's own metadata builder (``runner_v1/sources/draft_model.py``).

    Args:
        layers: the draft's ``Attention`` layers by name, with their cache allocated.
        builder: vLLM's metadata builder of these layers.

    Raises:
        ValueError: the draft's attention is not plain.
    """

    def __init__(self, layers: dict, builder) -> None:
        self.layer_names = list(layers)
        """Each layer has a slot mapping in a pass."""
        self._builder = builder

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows], int32
        block_table: torch.Tensor,  # [num_rows, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, Any]:
        """Return metadata by layer of a pass of ``query_len`` tokens a row, once for each graph."""
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
        """Return metadata by layer of a pass that feeds whole windows."""


def replace_impl(layer, impl_cls: type, **attributes: Any) -> None:
    """Replace a layer's implementation by a subclass of it, with the same settings.

    Args:
        impl_cls: subclass of the layer's implementation class.
        attributes: further attributes of the new implementation.
    """
    impl: Any = object.__new__(impl_cls)
    impl.__dict__.update(layer.impl.__dict__, **attributes)
    swaps.LAYER_IMPL.set(layer, impl)


def metadata_of(layer) -> Any:
    """Return a layer's attention metadata in the running pass; None where it has none."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
