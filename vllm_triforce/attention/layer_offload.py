"""What attention reads of a layer whose KV cache lies in host memory."""

from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context


class LayerOffload(Protocol):
    """One such layer's (``offload/cache.py``)."""

    pool: torch.Tensor | None
    """[num_slots * width, num_kv_heads, block_size, size], what level 2 reads and writes; None
    where it never runs."""

    def stage(
        self,
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
    ) -> torch.Tensor:
        """The layer's KV cache, [num_blocks, num_kv_heads, block_size, size], on the device, as far
        as these requests read it."""
        ...


def metadata_of(layer) -> Any:
    """Attention metadata of a layer in the pass that runs; None where there is none."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
