"""Placement of layers' KV cache on the device and in host memory, and its number of blocks."""

from dataclasses import dataclass

_GIB = 1 << 30
# Below this multiple of the device's memory, PCIe transfers in each pass gain too few blocks.
_MIN_GAIN = 1.1


@dataclass(frozen=True)
class Placement:
    """First layers on the device, the others in host memory.

    Args:
        page_bytes: bytes of a block in one layer.
        pool_bytes: bytes on the device of each host layer's level 2 pool.
    """

    num_layers: int
    num_device_layers: int
    num_blocks: int
    page_bytes: int
    pool_bytes: int = 0

    @property
    def num_host_layers(self) -> int:
        return self.num_layers - self.num_device_layers

    @property
    def host_bytes(self) -> int:
        """Bytes of KV in host memory, on this rank."""
        return self.num_host_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of KV of a layer, and of the staging layer."""
        return self.num_blocks * self.page_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of all layers, on either side; vLLM plans its blocks with this number."""
        return self.num_layers * self.layer_bytes


def place_layers(
    num_layers: int,
    page_bytes: int,
    host_bytes: int,
    device_bytes: int,
    pool_bytes: int,
    summary_share: float,
    max_blocks: int,
) -> Placement:
    """Place layers for the most blocks up to ``max_blocks``, then for the most device layers.

    With fewer host layers, more blocks fit in host memory and fewer on the device, which also has
    the staging layer, level 2's pool and the chunk summaries.

    Args:
        page_bytes: bytes of a block in one layer.
        host_bytes: host memory for KV on this rank.
        device_bytes: device memory for KV, the staging layer, the pool and chunk summaries.
        pool_bytes: bytes on the device of each host layer's level 2 pool.
        summary_share: bytes of chunk summaries for each byte of KV.
        max_blocks: blocks that the engine can use.

    Raises:
        ValueError: not a single block fits.
    """

    def fitting_blocks(num_device_layers: int) -> int:
        """Count the blocks that fit both in host memory and on the device."""
        num_host_layers = num_layers - num_device_layers
        # The device holds its own layers, the staging layer, and the summaries of all.
        layers_of_kv = num_device_layers + 1 + summary_share * num_layers
        kv_bytes = device_bytes - pool_bytes * num_host_layers
        host_blocks = min(max_blocks, host_bytes // (page_bytes * num_host_layers))
        return min(host_blocks, int(max(0, kv_bytes) // (page_bytes * layers_of_kv)))

    num_blocks, num_device_layers = max((fitting_blocks(n), n) for n in range(num_layers))
    if num_blocks < 1:
        raise ValueError(
            f"kv_offload_gib={host_bytes / _GIB:g}: the device has {device_bytes / _GIB:.2f} GiB "
            f"for a staging layer, chunk summaries and level 2's pool of {num_layers} layers, "
            f"which takes {pool_bytes * num_layers / _GIB:.2f} GiB; lower "
            "max_speculating_seqs or retrieval_budget, or raise --gpu-memory-utilization"
        )
    return Placement(num_layers, num_device_layers, num_blocks, page_bytes, pool_bytes)


def all_would_fit(placement: Placement, device_bytes: int, summary_share: float) -> bool:
    """True if the device could hold about this many blocks of all layers; offloading then costs."""
    return placement.kv_bytes * (1 + summary_share) <= _MIN_GAIN * device_bytes
