"""What the ranks of a tensor-parallel group have to agree on."""

from vllm.distributed.parallel_state import get_tp_group


def broadcast_from_first_rank(value):
    """The first rank's value, on every rank of the tensor-parallel group."""
    group = get_tp_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)
