"""Roofline of a model pass: bytes over bandwidth or operations over peak, and launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine

# Kernels in a pass's graph: of a layer, of its experts, and beside the layers (read off vLLM).
_LAYER_KERNELS, _MOE_LAYER_KERNELS, _PASS_KERNELS = 9, 5, 4


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass, and seconds of the same bytes or operations at the machine's peak."""

    seconds: float
    limit_seconds: float

    def times(self, count: float) -> "Pass":
        return Pass(count * self.seconds, count * self.limit_seconds)


NO_PASS = Pass(0.0, 0.0)


def model_pass(
    machine: Machine,
    model: Geometry,
    tokens: Sequence[int],
    kv_tokens: Sequence[int],
    num_graphs: float = 1,
) -> Pass:
    """Predict a pass of requests with ``tokens`` each over ``kv_tokens`` of KV cache each.

    Weights are read once, experts if a token is routed to them, each request's KV cache once for
    all tokens. Dense layers, experts and attention follow one another; each takes the longer of
    reading and computing.

    Args:
        num_graphs: CUDA graphs of the pass; passes that share one have a share of it each.
    """
    each, num_tokens = model.weight_bytes_each, sum(tokens)
    embedding_rows = num_tokens * model.hidden * each
    # Each part as bytes to read and operations to compute.
    dense = model.dense_weights * each + embedding_rows, 2 * model.dense_weights * num_tokens
    layer_experts = model.expert_weights * model.layers
    experts = (
        layer_experts * model.experts_touched(num_tokens) * each,
        2 * layer_experts * model.active_experts * num_tokens,
    )
    pairs = sum(q * c for q, c in zip(tokens, kv_tokens))
    attention = (
        sum(kv_tokens) * model.kv_bytes_per_token,
        4 * model.layers * model.heads * model.head_dim * pairs,
    )
    bandwidth = machine.bandwidth * machine.bandwidth_share
    flops = machine.flops * machine.flops_share
    busy_share = machine.occupancy(len(tokens), max(tokens), model.heads, model.kv_heads)
    layer_kernels = _LAYER_KERNELS + _MOE_LAYER_KERNELS * (model.experts > 0)
    kernels = model.layers * layer_kernels + _PASS_KERNELS
    seconds = (
        max(dense[0] / bandwidth, dense[1] / flops)
        + max(experts[0] / bandwidth, experts[1] / flops)
        + max(attention[0] / machine.attention_bandwidth, attention[1] / machine.attention_flops)
        / busy_share
        + kernels * machine.kernel_seconds
        + num_graphs * machine.graph_launch_seconds
    )
    num_bytes, operations = (sum(parts) for parts in zip(dense, experts, attention))
    return Pass(seconds, max(num_bytes / machine.bandwidth, operations / machine.flops))


@cache
def uniform_pass(
    machine: Machine,
    model: Geometry,
    batch: int,
    tokens: int,
    kv_tokens: int,
    num_graphs: float = 1,
) -> Pass:
    """Predict a pass of ``batch`` equal requests."""
    return model_pass(machine, model, [tokens] * batch, [kv_tokens] * batch, num_graphs)
