"""The roofline of a pass: what it must read, over bandwidth, or compute, over peak."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass, and below which no machine of that bandwidth and peak can come."""

    seconds: float
    limit_seconds: float

    def times(self, count: float) -> "Pass":
        return Pass(count * self.seconds, count * self.limit_seconds)


NOTHING = Pass(0.0, 0.0)


def model_pass(
    machine: Machine,
    model: Geometry,
    counts: Counts,
    tokens: Sequence[int],
    kv_tokens: Sequence[int],
) -> Pass:
    """A pass of requests with ``tokens`` each over ``kv_tokens`` of KV cache each.

    Weights are read once, experts where a token goes through them, and each request's KV cache
    once, whatever the number of its tokens. Dense layers, experts and attention follow one another:
    each takes the longer of reading and computing.
    """
    each, num_tokens = model.weight_bytes_each, sum(tokens)
    rows = num_tokens * model.hidden * each  # of the embedding
    dense = model.dense_weights * each + rows, 2 * model.dense_weights * num_tokens
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
    busy = machine.occupancy(len(tokens), max(tokens), model.heads, model.kv_heads)
    kernels = model.layers * counts.layer_kernels + counts.pass_kernels
    kernels += model.layers * counts.moe_layer_kernels * (model.experts > 0)
    seconds = (
        max(dense[0] / bandwidth, dense[1] / flops)
        + max(experts[0] / bandwidth, experts[1] / flops)
        + max(attention[0] / machine.attention_bandwidth, attention[1] / machine.attention_flops)
        / busy
        + kernels * machine.kernel_seconds
        + counts.graphs_per_pass * machine.graph_launch_seconds
    )
    read, computed = (sum(parts) for parts in zip(dense, experts, attention))
    return Pass(seconds, max(read / machine.bandwidth, computed / machine.flops))


@cache
def uniform_pass(
    machine: Machine, model: Geometry, counts: Counts, batch: int, tokens: int, kv_tokens: int
) -> Pass:
    """Of ``batch`` requests that are alike."""
    return model_pass(machine, model, counts, [tokens] * batch, [kv_tokens] * batch)
