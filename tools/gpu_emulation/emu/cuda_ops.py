"""PyTorch stand-ins for vLLM's CUDA operations and FlashAttention 3, as dense models use them.

Schemas come from vLLM's CUDA libraries, so wrong arguments fail as on a GPU. The error "Could not
run '...' with arguments from the 'CPU' backend" names an operation that still needs a stand-in.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from .report import report

_libraries: dict[str, torch.library.Library] = {}


def install() -> None:
    import vllm._custom_ops  # noqa: F401  (registers the schemas)
    import vllm.vllm_flash_attn.flash_attn_interface as flash_attn

    if not flash_attn.FA3_AVAILABLE:
        raise RuntimeError(f"FlashAttention 3 did not load: {flash_attn.FA3_UNAVAILABLE_REASON}")
    for namespace, name, function in _STAND_INS:
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "IMPL"))
        library.impl(name, function, "CPU")


_STAND_INS: list[tuple] = []


def stands_in_for(namespace: str, name: str):
    def register(function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            report.ops[f"{namespace}.{name}"] += 1
            return function(*args, **kwargs)

        _STAND_INS.append((namespace, name, counted))
        return function

    return register


def _rms_norm(x, weight, epsilon):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight


@stands_in_for("_C", "rms_norm")
def rms_norm(result, input, weight, epsilon):
    result.copy_(_rms_norm(input, weight, epsilon))


@stands_in_for("_C", "fused_add_rms_norm")
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    input.copy_(_rms_norm(residual, weight, epsilon))


@stands_in_for("_C", "weak_ref_tensor")
def weak_ref_tensor(input):
    """Return a view; operations of the graph keep the tensor alive."""
    return input.view_as(input)


@stands_in_for("_C", "silu_and_mul")
def silu_and_mul(result, input):
    gate, up = input.chunk(2, -1)
    result.copy_(F.silu(gate) * up)


@stands_in_for("_C", "gelu_tanh_and_mul")
def gelu_tanh_and_mul(result, input):
    gate, up = input.chunk(2, -1)
    result.copy_(F.gelu(gate, approximate="tanh") * up)


@stands_in_for("_C", "relu_squared")
def relu_squared(result, input):
    result.copy_(F.relu(input).square())


@stands_in_for("_C", "rotary_embedding")
def rotary_embedding(
    positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):
    if rope_dim_offset or inverse:
        raise NotImplementedError(
            "the emulated rotary_embedding has neither rope_dim_offset nor inverse"
        )
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        if x is None:
            continue
        rotated = x.view(positions.numel(), -1, head_size)[..., :rotary_dim]
        wide = rotated.float()
        a, b = wide.chunk(2, -1) if is_neox else (wide[..., ::2], wide[..., 1::2])
        halves = (a * cos - b * sin, b * cos + a * sin)
        rotated.copy_(torch.cat(halves, -1) if is_neox else torch.stack(halves, -1).flatten(-2))


@stands_in_for("_C_cache_ops", "reshape_and_cache_flash")
def reshape_and_cache_flash(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    slot_mapping,  # [num_actual_tokens], -1 for padding
    kv_cache_dtype,
    k_scale,
    v_scale,
):
    if kv_cache_dtype.startswith("fp8"):
        raise NotImplementedError("the emulated KV cache has no fp8")
    tokens = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[tokens]
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = key[tokens]
    value_cache[blocks, offsets] = value[tokens]


@stands_in_for("_C_cache_ops", "concat_and_cache_mla")
def concat_and_cache_mla(
    kv_c,  # [num_tokens, kv_lora_rank]
    k_pe,  # [num_tokens, rope_dim]
    kv_cache,  # [num_blocks, block_size, kv_lora_rank + rope_dim]
    slot_mapping,
    kv_cache_dtype,
    scale,
):
    tokens = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[tokens]
    blocks, offsets = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    kv_cache[blocks, offsets] = torch.cat([kv_c, k_pe], dim=-1)[tokens]


@stands_in_for("_C_cache_ops", "gather_and_maybe_dequant_cache")
def gather_and_maybe_dequant_cache(
    src_cache,  # [num_blocks, block_size, kv_lora_rank + rope_dim]
    dst,  # [num_tokens or more, kv_lora_rank + rope_dim], written
    block_table,  # [num_seqs, max_blocks]
    cu_seq_lens,  # [num_seqs + 1]
    token_to_seq,  # [num_tokens]
    num_tokens,
    kv_cache_dtype,
    scale,
    seq_starts,  # [num_seqs], first position of each sequence; None for 0
):
    sequences = token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens) - cu_seq_lens[sequences]
    if seq_starts is not None:
        positions = positions + seq_starts[sequences]
    size = src_cache.shape[1]
    blocks = block_table[sequences, positions // size].long()
    dst[:num_tokens] = src_cache[blocks, positions % size]


@stands_in_for("_C", "merge_attn_states")
def merge_attn_states(
    output,  # [num_tokens, num_heads, head_dim], written
    output_lse,  # [num_heads, num_tokens] as all of them, written; None if not asked for
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    num_with_prefix=None,  # first tokens, which have a prefix; None for all
    output_scale=None,
):
    if output_scale is not None:
        raise NotImplementedError("the emulated attention states have no fp8")
    merged = torch.logaddexp(prefix_lse.float(), suffix_lse.float())
    if num_with_prefix is not None:
        merged[:, num_with_prefix:] = suffix_lse[:, num_with_prefix:]
        prefix_lse = prefix_lse.clone()
        prefix_lse[:, num_with_prefix:] = float("-inf")
    shares = (torch.exp(lse.float() - merged).T.unsqueeze(-1) for lse in (prefix_lse, suffix_lse))
    parts = [share * part.float() for share, part in zip(shares, (prefix_output, suffix_output))]
    output.copy_(parts[0].nan_to_num_(0.0) + parts[1])
    if output_lse is not None:
        output_lse.copy_(merged)


@stands_in_for("_vllm_fa3_C", "get_scheduler_metadata")
def get_scheduler_metadata(batch_size, *args):
    # Only the real kernel reads it. The size is that of vLLM's buffer.
    return torch.zeros(1 + -(-batch_size // 4) * 4 * 4, dtype=torch.int32)


@stands_in_for("_vllm_fa3_C", "fwd")
def flash_attention_3(
    q,  # [num_tokens, num_heads, head_dim]
    k,  # [num_blocks, block_size, num_kv_heads, head_dim]; without a page table
    v,  # [num_keys, num_kv_heads, head_dim]
    k_new,
    v_new,
    q_v,
    out,
    cu_seqlens_q,  # [num_seqs + 1]
    cu_seqlens_k,
    cu_seqlens_k_new,
    seqused_q,
    seqused_k,  # [num_seqs]
    max_seqlen_q,
    max_seqlen_k,
    page_table,  # [num_seqs, max_blocks]
    kv_batch_idx,
    leftpad_k,
    rotary_cos,
    rotary_sin,
    seqlens_rotary,
    q_descale,  # the three scales are for fp8 only
    k_descale,
    v_descale,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    is_rotary_interleaved,
    scheduler_metadata,
    num_splits,
    pack_gqa,
    sm_margin,
    s_aux,
    cp_world_size,
    cp_rank,
    cp_tot_seqused_k,
):
    unsupported = dict(
        k_new=k_new, v_new=v_new, q_v=q_v, cu_seqlens_k_new=cu_seqlens_k_new, seqused_q=seqused_q,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos,
        cp_tot_seqused_k=cp_tot_seqused_k,
    )  # fmt: skip
    if given := [name for name, value in unsupported.items() if value is not None]:
        raise NotImplementedError(
            f"the emulated FlashAttention 3 does not support {', '.join(given)}"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"FlashAttention 3 takes float16 and bfloat16, not {q.dtype}")

    # The values of MLA have another size than the queries.
    out = q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"))
    starts = cu_seqlens_q.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if page_table is not None:
            num_keys = int(seqused_k[i])
            blocks = page_table[i, : -(-num_keys // k.shape[1])].long()
            keys, values = (cache[blocks].flatten(0, 1)[:num_keys] for cache in (k, v))
        else:
            first, last = cu_seqlens_k[i : i + 2].tolist()
            keys, values = k[first:last], v[first:last]
        if end > start:
            out[start:end], lse[:, start:end] = _attention(
                q[start:end],
                keys,
                values,
                softmax_scale,
                is_causal,
                window_size_left,
                window_size_right,
                softcap,
                s_aux,
            )
    unused = torch.empty(0)
    return [out, lse, unused, unused]


def _attention(q, k, v, scale, is_causal, window_left, window_right, softcap, sinks=None):
    """Attend over one sequence.

    Returns:
        Output [num_queries, num_heads, head_dim] and log-sum-exp [num_heads, num_queries].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # The last query is aligned with the last key.
    distance = torch.arange(k.shape[0]) - (
        torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    )
    if is_causal:
        window_right = 0
    if window_right >= 0:
        scores.masked_fill_(distance > window_right, float("-inf"))
    if window_left >= 0:
        scores.masked_fill_(distance < -window_left, float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None])
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(
        0.0
    )  # a query that sees no key gives zero
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), lse
