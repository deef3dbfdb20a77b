"""KV cache of a layer in host memory, as attention reads it."""

from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context


class LayerOffload(Protocol):
    """Device copies of one layer's KV cache in host memory (``offload/staging.py``)."""

    pool: torch.Tensor | None
    """[num_slots * width, num_kv_heads, block_size, size], level 2's pool; None where level 2 never
    runs."""

    def staged(
        self,
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
        query_start_loc: torch.Tensor,  # [num_reqs + 1], int32
    ) -> torch.Tensor:
        """Return the layer's KV cache on the device, [num_blocks, num_kv_heads, block_size, size],
        with the blocks that these requests read."""
        ...


def metadata_of(layer) -> Any:
    """Return a layer's attention metadata in the running pass; None where it has none."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
