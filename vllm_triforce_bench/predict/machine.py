"""What a machine can do: the handful of numbers that a decoding step is made of."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


_SHARES = (
    "bandwidth_share",
    "flops_share",
    "attention_bandwidth_share",
    "attention_flops_share",
)


@dataclass(frozen=True)
class Machine:
    """
    Args:
        memory_bytes: of the device.
        bandwidth: bytes a second, peak.
        flops: a second, peak, in the weights' precision.
        bandwidth_share, flops_share: of these, what kernels reach.
        attention_bandwidth_share, attention_flops_share: what attention reaches; 0: as the others.
        num_sms: multiprocessors; one thread block of attention runs on each. 0: not a GPU.
        splits_queries: whether attention divides a sequence's KV among thread blocks, however many
            tokens a query has (FlashAttention 3), or only where a query has one token and heads
            are grouped (FlashAttention 2 as vLLM calls it).
        launch_seconds: of a kernel that no CUDA graph holds.
        graph_launch_seconds: of a CUDA graph.
        kernel_seconds: of a kernel within a graph, beside what it reads and computes.
        upload_seconds: of a copy from the host to the device.
        sync_seconds: of waiting for the device once.
        host_bandwidth: bytes a second that copies reach from host memory to the device, one
            direction; None: unknown.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    bandwidth_share: float = 0.85
    flops_share: float = 0.6
    attention_bandwidth_share: float = 0.0
    attention_flops_share: float = 0.0
    num_sms: int = 0
    splits_queries: bool = True
    launch_seconds: float = 0.0
    graph_launch_seconds: float = 0.0
    kernel_seconds: float = 0.0
    upload_seconds: float = 0.0
    sync_seconds: float = 0.0
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = ("memory_bytes", "bandwidth", "flops", "bandwidth_share", "flops_share")
            if field.type is float and (value < 0 or (value == 0 and field.name in least)):
                raise ValueError(f"machine {self.name!r} has {field.name}={value!r}; give more")
        if self.host_bandwidth is not None and self.host_bandwidth <= 0:
            raise ValueError(
                f"machine {self.name!r} has host_bandwidth={self.host_bandwidth!r}; give more, or "
                "leave it out where it is unknown"
            )
        for name in _SHARES:
            if getattr(self, name) > 1:
                raise ValueError(
                    f"machine {self.name!r} has {name}={getattr(self, name)!r}, more than its "
                    "peak; give a share up to 1"
                )
        if not self.splits_queries and not self.num_sms:
            raise ValueError(
                f"machine {self.name!r} does not split queries' KV, and num_sms is 0: nothing says "
                "what then stands idle; give num_sms"
            )

    @property
    def attention_bandwidth(self) -> float:
        """Bytes a second."""
        return self.bandwidth * (self.attention_bandwidth_share or self.bandwidth_share)

    @property
    def attention_flops(self) -> float:
        """Operations a second."""
        return self.flops * (self.attention_flops_share or self.flops_share)

    def occupancy(self, num_reqs: int, query_tokens: int, heads: int, kv_heads: int) -> float:
        """Share of the device that attention keeps busy.

        FlashAttention 2, in vLLM's ``varlen`` form, divides a sequence's KV only where each query
        is one token and heads are grouped (``seqlenq_ngroups_swapped`` in its
        ``csrc/flash_attn/flash_api.cpp``). Otherwise a request and head is one thread block, for
        every 64 tokens of the query.
        """
        if self.splits_queries or (query_tokens == 1 and heads > kv_heads):
            return 1.0
        blocks = num_reqs * heads * -(-query_tokens // 64)
        return min(1.0, blocks / self.num_sms)

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """As ``vllm-triforce predict --measure-machine`` writes it.

        Raises:
            ValueError: a key is missing, unknown, or out of range.
        """
        return from_json(cls, path)


def from_json(kind, path: Path):
    """A dataclass of numbers and names from a JSON object with its fields.

    Raises:
        ValueError: it is no such object; the message names the file and the key.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(found, dict) or (unknown := found.keys() - fields):
        what = sorted(unknown) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path} has {what}, which is not known; use {sorted(fields)}")
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _gpu(
    name: str,
    gib: float,
    bandwidth: float,
    flops: float,
    sms: int,
    splits: bool,
    host_bandwidth: float | None = None,
) -> Machine:
    """Launches cost about the same on all of them: they are the host's."""
    return Machine(
        name,
        gib * GIB,
        bandwidth,
        flops,
        num_sms=sms,
        splits_queries=splits,
        launch_seconds=5e-6,
        graph_launch_seconds=15e-6,
        kernel_seconds=1.2e-6,
        upload_seconds=6e-6,
        sync_seconds=30e-6,
        host_bandwidth=host_bandwidth,
    )


# Peaks are the vendors' (dense, bfloat16 with float32 sums); shares and launches are assumptions
# until they are measured (docs/prediction.md). Memory is what is left of 141, 80, 24 and 96 GB.
# Host memory is reached at: PCIe 5 x16, 50 GB/s assumed of 63; PCIe 4 x16, 25 assumed of 31.5;
# NVLink-C2C, 375 of 450, measured by others from host to device (arXiv 2407.07850).
MACHINES = {
    "H200": _gpu("H200", 139, 4.8e12, 989e12, 132, True, 50e9),
    "A100-80GB": _gpu("A100-80GB", 79, 2.039e12, 312e12, 108, False),
    "RTX-4090": _gpu("RTX-4090", 23.5, 1.008e12, 165e12, 128, False, 25e9),
    "GH200": _gpu("GH200", 94.5, 4.0e12, 989e12, 132, True, 375e9),
}


def named_machine(name: str) -> Machine:
    """One of ``MACHINES``, or a file of ``vllm-triforce predict --measure-machine``.

    Raises:
        ValueError: it is neither.
    """
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise ValueError(f"machine {name!r} is no file and none of {list(MACHINES)}")
    return Machine.load(Path(name))


def machine_of(device: str) -> Machine | None:
    """The machine that PyTorch calls so; None where it is not a named one."""
    words = device.replace("-", " ").split()  # whole ones: a GH200 is no H200
    for name, machine in MACHINES.items():
        if all(part in words for part in name.split("-")):
            return machine
    return None
