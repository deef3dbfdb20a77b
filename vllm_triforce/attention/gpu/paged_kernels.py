"""vLLM's own paged attention kernels for GPUs, as level 2 and level 1 call them.

They are called directly rather than through a backend's metadata. The arguments of a pass are fixed
when its CUDA graph is captured: lengths and block tables on the device, upper bounds on the host.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch

from vllm_triforce.attention.base import LayerSelection


@dataclass
class PagedSequences:
    """Sequences that a kernel attends over; tensors' contents change between replays of a graph."""

    query_start_loc: torch.Tensor  # [num_seqs + 1], int32
    seq_lens: torch.Tensor  # [num_seqs], int32
    block_table: torch.Tensor  # [num_seqs, width], int32
    max_query_len: int
    max_seq_len: int
    schedules: dict[tuple, torch.Tensor] = field(default_factory=dict, kw_only=True)
    """FlashAttention 3's schedules of a pass (``FlashAttention``), which all its layers share."""


@dataclass
class SparseSequences(PagedSequences):
    """Sequences of a level 2 pass: a request is ``num_kv_heads`` one-head sequences, all equally
    long."""

    selection: LayerSelection | None = None
    """Completes the layer's block table; None where it is complete."""


@cache  # graphs rely on the addresses
def uniform_starts(num_seqs: int, query_len: int, device: torch.device) -> torch.Tensor:
    """Return query start locations of equally long sequences, [num_seqs + 1], int32."""
    return torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len


class PagedKernel(Protocol):
    """Kernel that computes a layer's attention over the paged cache."""

    def __call__(
        self,
        layer,
        impl,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,
        sequences: PagedSequences,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> None: ...


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention, as vLLM ships it.

    It schedules itself on the device, version 3 in the first layer of a pass for all. A graph of
    the pass does so again in each replay: metadata computed before it would be stale.

    Args:
        version: 2 or 3.
    """

    version: int

    def __call__(self, layer, impl, query, key_cache, value_cache, sequences, output) -> None:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        arguments = _arguments(layer, impl, query, key_cache, value_cache, sequences, output)
        descale, window = (len(sequences.seq_lens), key_cache.shape[2]), _window(impl)
        if self.version == 3:
            key = (query.shape[1:], query.dtype, key_cache.shape[1:], window)
            if key not in sequences.schedules:
                sequences.schedules[key] = _schedule(arguments, window)
            arguments["scheduler_metadata"] = sequences.schedules[key]
        sinks = impl.sinks
        found = flash_attn_varlen_func(
            **arguments,
            window_size=list(window),
            q_descale=layer._q_scale.expand(descale) if query.dtype.itemsize == 1 else None,
            return_softmax_lse=sinks is not None,
            fa_version=self.version,
        )
        if sinks is not None:
            give_sinks_their_share(output, found[1], sinks, sequences.max_query_len)


def give_sinks_their_share(
    output: torch.Tensor,  # [num_rows * num_kv_heads * query_len, group, head_dim], written
    lse: torch.Tensor,  # [group, num_rows * num_kv_heads * query_len], float32
    sinks: torch.Tensor,  # [num_heads]
    query_len: int,
) -> None:
    """Add attention sinks to the softmax of one-head sequences, after the attention.

    The kernels take the same sinks for all sequences, but here these are of different heads. With a
    sink ``s`` the sum of exponentials is ``exp(lse) + exp(s)`` in the place of ``exp(lse)``.
    """
    group = output.shape[1]
    by_head = sinks.float().view(-1, 1, group)  # [num_kv_heads, 1, group]
    shares = torch.sigmoid(lse.T.reshape(-1, len(by_head), query_len, group) - by_head)
    output.mul_(shares.view(-1, group, 1))


def _schedule(arguments: dict[str, Any], window: tuple[int, int]) -> torch.Tensor:
    """Compute scheduler metadata for these arguments of the attention.

    FlashAttention 3 refuses metadata of other arguments by its size.
    """
    from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

    query, keys = arguments["q"], arguments["k"]
    return get_scheduler_metadata(
        batch_size=len(arguments["seqused_k"]),
        max_seqlen_q=arguments["max_seqlen_q"],
        max_seqlen_k=arguments["max_seqlen_k"],
        num_heads_q=query.shape[1],
        num_heads_kv=keys.shape[2],
        headdim=query.shape[2],
        cache_seqlens=arguments["seqused_k"],
        qkv_dtype=query.dtype,
        cu_seqlens_q=arguments["cu_seqlens_q"],
        page_size=keys.shape[1],
        causal=arguments["causal"],
        window_size=window,
        has_softcap=arguments["softcap"] > 0,
    )


def triton_attention(layer, impl, query, key_cache, value_cache, sequences, output) -> None:
    """Run vLLM's Triton kernel: any GPU, any precision, fp8 KV caches included.

    With attention sinks, which differ by head, the sequences of one KV head are a launch.
    """
    if impl.sinks is None:
        _launch_triton(layer, impl, query, key_cache, value_cache, sequences, output)
        return
    heads, length = impl.num_kv_heads, sequences.max_query_len
    shape = (-1, heads, length, *query.shape[1:])
    queries, outputs = query.view(shape), output.view(shape)
    for head, sinks in enumerate(impl.sinks.view(heads, -1)):
        of_head = replace(
            sequences,
            query_start_loc=sequences.query_start_loc[: len(queries) + 1],
            seq_lens=sequences.seq_lens[head::heads].contiguous(),
            block_table=sequences.block_table[head::heads],
        )
        own = queries[:, head].flatten(0, 1)
        result = torch.empty_like(own, dtype=output.dtype)
        _launch_triton(layer, impl, own, key_cache, value_cache, of_head, result, sinks)
        outputs[:, head] = result.view_as(outputs[:, head])


def _launch_triton(
    layer, impl, query, key_cache, value_cache, sequences, output, sinks=None
) -> None:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    unified_attention(
        **_arguments(layer, impl, query, key_cache, value_cache, sequences, output),
        window_size=_window(impl),
        q_descale=layer._q_scale if query.dtype.itemsize == 1 else None,
        kv_quant_mode=get_kv_quant_mode(impl.kv_cache_dtype),
        sinks=sinks,
    )


def _arguments(
    layer, impl, query, key_cache, value_cache, sequences: PagedSequences, output
) -> dict[str, Any]:
    """Return the arguments that both kernels take alike."""
    descale = (len(sequences.seq_lens), key_cache.shape[2])
    return {
        "q": query,
        "k": key_cache,
        "v": value_cache,
        "out": output,
        "cu_seqlens_q": sequences.query_start_loc,
        "max_seqlen_q": sequences.max_query_len,
        "seqused_k": sequences.seq_lens,
        "max_seqlen_k": sequences.max_seq_len,
        "softmax_scale": impl.scale,
        "causal": True,
        "block_table": sequences.block_table,
        "softcap": getattr(impl, "logits_soft_cap", 0) or 0,
        "k_descale": layer._k_scale.expand(descale),
        "v_descale": layer._v_scale.expand(descale),
    }


def _window(impl) -> tuple[int, int]:
    """Return (tokens before, tokens after) that a query sees; FlashInfer keeps only the first."""
    if hasattr(impl, "sliding_window"):
        return impl.sliding_window
    return (impl.window_left, 0 if impl.window_left >= 0 else -1)
