"""Which layers' KV cache lies on the device, which in host memory, and how many blocks it has."""

from dataclasses import dataclass

_GIB = 1 << 30
# Times the device's room; for less each pass need not cross PCIe.
_WORTH = 1.1


@dataclass(frozen=True)
class Placement:
    """The first layers are on the device, the others in host memory.

    Args:
        page_bytes: of a block in one layer.
        pool_bytes: that each layer in host memory takes on the device for level 2.
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
        """In host memory, of this rank."""
        return self.num_host_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Of a layer, and of the staging layer."""
        return self.num_blocks * self.page_bytes

    @property
    def kv_bytes(self) -> int:
        """Of all layers, wherever they lie: what vLLM is told of."""
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
    """As many blocks as fit, up to ``max_blocks``; where several placements have as many, that
    with the most layers on the device. The fewer layers lie in host memory, the more blocks fit
    there, and the fewer on the device, beside the staging layer, the retrieval pool and the chunk
    summaries.

    Args:
        page_bytes: of a block in one layer.
        host_bytes: for KV, of this rank.
        device_bytes: left for KV and what is here beside it.
        pool_bytes: that each layer in host memory takes on the device for level 2.
        summary_share: bytes of chunk summaries for each byte of KV.
        max_blocks: that there is a use for.

    Raises:
        ValueError: not one block fits on either side.
    """

    def blocks(num_device_layers: int) -> int:
        """That fit in host memory as well as on the device."""
        num_host = num_layers - num_device_layers
        held = num_device_layers + 1 + summary_share * num_layers  # one layer is for staging
        room = device_bytes - pool_bytes * num_host
        in_host = min(max_blocks, host_bytes // (page_bytes * num_host))
        return min(in_host, int(max(0, room) // (page_bytes * held)))

    num_blocks, num_device_layers = max((blocks(number), number) for number in range(num_layers))
    if num_blocks < 1:
        raise ValueError(
            f"kv_offload_gib={host_bytes / _GIB:g}: the device has {device_bytes / _GIB:.2f} GiB "
            f"for a staging layer, chunk summaries and level 2's pool of {num_layers} layers, "
            f"which takes {pool_bytes * num_layers / _GIB:.2f} GiB; lower "
            "max_speculating_seqs or retrieval_budget, or raise --gpu-memory-utilization"
        )
    return Placement(num_layers, num_device_layers, num_blocks, page_bytes, pool_bytes)


def all_would_fit(placement: Placement, device_bytes: int, summary_share: float) -> bool:
    """Whether the device could hold about as many blocks of all layers: then offloading only
    costs."""
    return placement.kv_bytes * (1 + summary_share) <= _WORTH * device_bytes
