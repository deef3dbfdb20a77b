"""Roofline of a model pass: bytes over bandwidth or operations over peak, and launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine


@dataclass(frozen=True)
class Counts:
    """Kernels, uploads and waits of a greedy step.

    Steps and proposals were counted with a draft on Model Runner V2
    (docs/results/2026-11-23-counts.md); kernels within passes are read off its code.

    Args:
        graphs_per_pass: CUDA graphs of each pass; the draft passes of a round share one.
        step_kernels: of any step, stock vLLM's too: input preparation, sampling.
        verified_kernels: added to a step that verifies drafts.
        proposal_kernels: of a proposal: its rows, level 1's window, export of logits.
        drafting_kernels: of each drafted token, beside its pass and in the round's graph.
        level2_kernels: on level 2's logits, in the pass's graph.
        round_kernels: of a round of levels 1 and 2, outside its graphs.
        direct_round_kernels: of each ``gamma`` tokens that go straight to the full pass.
        selection_kernels: of a selection of chunks.
        step_uploads, proposal_uploads: copies to the device.
        step_syncs: waits for the device in any step. Asynchronous scheduling overlaps a part.
        layer_kernels: of a layer, in a pass's graph.
        moe_layer_kernels: added by a layer's experts.
        pass_kernels: of a pass, beside its layers.
        logits_reads: reads and writes of a vocabulary's row for a verified token.
    """

    graphs_per_pass: float = 1
    step_kernels: float = 20
    verified_kernels: float = 2
    proposal_kernels: float = 13
    drafting_kernels: float = 6
    level2_kernels: float = 3
    round_kernels: float = 2
    direct_round_kernels: float = 1
    selection_kernels: float = 17
    step_uploads: float = 2
    proposal_uploads: float = 4
    step_syncs: float = 1
    layer_kernels: float = 9
    moe_layer_kernels: float = 5
    pass_kernels: float = 4
    logits_reads: float = 3


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
    counts: Counts,
    tokens: Sequence[int],
    kv_tokens: Sequence[int],
) -> Pass:
    """Predict a pass of requests with ``tokens`` each over ``kv_tokens`` of KV cache each.

    Weights are read once, experts if a token is routed to them, each request's KV cache once for
    all tokens. Dense layers, experts and attention follow one another; each takes the longer of
    reading and computing.
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
    kernels = model.layers * counts.layer_kernels + counts.pass_kernels
    kernels += model.layers * counts.moe_layer_kernels * (model.experts > 0)
    seconds = (
        max(dense[0] / bandwidth, dense[1] / flops)
        + max(experts[0] / bandwidth, experts[1] / flops)
        + max(attention[0] / machine.attention_bandwidth, attention[1] / machine.attention_flops)
        / busy_share
        + kernels * machine.kernel_seconds
        + counts.graphs_per_pass * machine.graph_launch_seconds
    )
    num_bytes, operations = (sum(parts) for parts in zip(dense, experts, attention))
    return Pass(seconds, max(num_bytes / machine.bandwidth, operations / machine.flops))


@cache
def uniform_pass(
    machine: Machine, model: Geometry, counts: Counts, batch: int, tokens: int, kv_tokens: int
) -> Pass:
    """Predict a pass of ``batch`` equal requests."""
    return model_pass(machine, model, counts, [tokens] * batch, [kv_tokens] * batch)
