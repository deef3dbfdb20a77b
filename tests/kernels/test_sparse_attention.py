"""Level 2's attention equals attention over the selected tokens, spelled out, for every kernel,
layout and geometry; other libraries' kernels serve as oracles where they are installed."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.kernels.device import DEVICE
from tests.kernels.oracles import attention
from vllm_triforce.attention.gpu.backends import kernel_for
from vllm_triforce.attention.gpu.draft import GPUDraftAttention
from vllm_triforce.attention.gpu.impl import _RetrievalImpl
from vllm_triforce.attention.gpu.paged_kernels import (
    FlashAttention,
    SparseSequences,
    give_sinks_their_share,
    triton_attention,
    uniform_starts,
)
from vllm_triforce.attention.gpu.retrieval import GPURetrievalAttention
from vllm_triforce.cache.one_head_blocks import OneHeadBlocks
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config.budget import chunk_size
from vllm_triforce.selection import Summary

ON_GPU = DEVICE.type == "cuda"
# What vLLM would use on this device: 3 on Hopper, 2 before it; level 2 knows these two.
FLASH_VERSION = get_flash_attn_version() if ON_GPU else None
KERNELS = [triton_attention] + ([FlashAttention(FLASH_VERSION)] if FLASH_VERSION in (2, 3) else [])
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = dict(rtol=2e-2, atol=2e-2) if ON_GPU else dict(rtol=1e-4, atol=1e-4)
# Tokens that each of three requests reads, the new ones included.
SEQ_LENS = [70, 3, 33]


class Case:
    """Three requests with a table per KV head over a paged cache of one layer."""

    def __init__(self, layout, group, kv_heads, dim, block_size, query_len) -> None:
        torch.manual_seed(group * dim + block_size)
        self.query_len, self.block_size = query_len, block_size
        num_blocks, chunk = 40, chunk_size(block_size)
        self.chunk, width = chunk, -(-max(SEQ_LENS) // chunk)
        shape = (num_blocks, kv_heads, block_size, 2 * dim)
        if layout == "token-major":
            shape = (num_blocks, block_size, kv_heads, 2 * dim)
        cache = torch.randn(shape).to(DTYPE).to(DEVICE)
        self.cache = cache.transpose(1, 2) if layout == "token-major" else cache
        num_chunks = num_blocks * (block_size // chunk)
        self.tables = torch.stack(
            [torch.randperm(num_chunks)[:width] for _ in range(3 * kv_heads)]
        ).view(3, kv_heads, width)
        # As in vLLM, keys and values lie behind each token's queries.
        projected = torch.randn(3 * query_len, kv_heads * (group + 2), dim).to(DTYPE).to(DEVICE)
        self.query = projected[:, : kv_heads * group]
        self.impl = SimpleNamespace(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_size=dim,
            scale=dim**-0.5,
            sliding_window=(-1, -1),
            logits_soft_cap=0,
            kv_cache_dtype="auto",
            vllm_flash_attn_version=FLASH_VERSION,
            sinks=None,
        )
        one = torch.ones(1, device=DEVICE)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)

    def attend(self, kernel, cache=None) -> torch.Tensor:
        impl = object.__new__(type("Sparse", (_RetrievalImpl,), {"kernel": staticmethod(kernel)}))
        impl.__dict__.update(vars(self.impl), offload=None)
        heads, cache = impl.num_kv_heads, self.cache if cache is None else cache
        keys, values = cache.transpose(1, 2).split(impl.head_size, dim=-1)
        blocks = OneHeadBlocks.of(keys, values, self.chunk)
        names = blocks.ids.of(self.tables, torch.arange(heads)[:, None])
        sequences = SparseSequences(
            uniform_starts(3 * heads, self.query_len, DEVICE),
            torch.tensor(SEQ_LENS, dtype=torch.int32).repeat_interleave(heads).to(DEVICE),
            names.flatten(0, 1).to(torch.int32).to(DEVICE),
            self.query_len,
            names.shape[2] * self.chunk,
        )
        output = torch.zeros_like(self.query)
        impl.forward(self.layer, self.query, None, None, cache, sequences, output)
        return output

    def vllm_layer(self) -> SimpleNamespace:
        """Make a layer as vLLM does under TRITON_ATTN."""
        impl = object.__new__(TritonAttentionImpl)
        plain = dict.fromkeys(("alibi_slopes", "kv_sharing_target_layer_name"))
        impl.__dict__.update(vars(self.impl), **plain)
        sizes = {name: vars(impl)[name] for name in ("num_heads", "num_kv_heads", "head_size")}
        return SimpleNamespace(
            impl=impl, kv_cache=self.cache, _k_scale_float=1.0, **sizes, **vars(self.layer)
        )

    def level2_of(self, layer: SimpleNamespace) -> tuple[GPURetrievalAttention, tuple]:
        """Attach level 2 to a layer; return it and what its attention takes before the output."""
        level2 = GPURetrievalAttention([layer], None)
        heads = self.impl.num_kv_heads
        tables = level2.chunk_ids().of(self.tables, torch.arange(heads)[:, None])
        tables = tables.flatten(0, 1)[None].to(torch.int32).to(DEVICE)
        lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE).repeat_interleave(heads)
        (metadata,) = level2.uniform(3, self.query_len, lens, tables)
        return level2, (layer, self.query, None, None, self.cache, metadata)

    def gathered(self, request: int, head: int):
        """Return the keys and values that a KV head of a request reads, [num_tokens, head_dim]."""
        chunks = self.cache.unflatten(2, (-1, self.chunk))[:, head].flatten(0, 1)
        own = chunks[self.tables[request, head].to(DEVICE)].flatten(0, 1)
        return own[: SEQ_LENS[request]].split(self.impl.head_size, dim=-1)

    def expected(self) -> torch.Tensor:
        lens = [self.query_len] * 3
        heads, sinks = self.impl.num_kv_heads, self.impl.sinks
        return attention(self.query, lens, SEQ_LENS, heads, self.gathered, sinks)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "block_size", "query_len"),
    [
        (1, 2, 64, 16, 1),
        (1, 3, 128, 32, 3),
        (4, 2, 64, 16, 3),
        (8, 1, 128, 16, 2),
        (4, 2, 64, 32, 2),
        (4, 2, 64, 160, 2),  # more tokens than a chunk
    ],
)
def test_sparse_attention(kernel, layout, group, kv_heads, dim, block_size, query_len):
    case = Case(layout, group, kv_heads, dim, block_size, query_len)
    torch.testing.assert_close(case.attend(kernel), case.expected(), **TOLERANCE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("group", "kv_heads", "query_len"), [(4, 2, 3), (1, 3, 1), (8, 2, 2)])
def test_each_head_has_its_attention_sink(kernel, group, kv_heads, query_len):
    case = Case("head-major", group, kv_heads, 64, 16, query_len)
    plain = case.expected()
    case.impl.sinks = torch.randn(kv_heads * group).mul(3).to(DTYPE).to(DEVICE)
    expected = case.expected()
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(case.attend(kernel), expected, **TOLERANCE)


def test_sinks_get_their_share_after_the_attention():
    """As with FlashAttention, from the sums of exponentials that it returns."""
    rows, heads, length, group, dim, keys = 2, 3, 2, 4, 8, 5
    scores = torch.randn(rows, heads, length, group, keys)
    values, sinks = torch.randn(rows, heads, keys, dim), torch.randn(heads * group) * 2
    lse = scores.logsumexp(-1).flatten(0, 2).T.contiguous()
    output = torch.einsum("rhlgk,rhkd->rhlgd", scores.softmax(-1), values).flatten(0, 2)
    give_sinks_their_share(output, lse, sinks, length)
    with_sinks = torch.cat([scores, sinks.view(heads, 1, group, 1).expand_as(scores[..., :1])], -1)
    probs = with_sinks.softmax(-1)[..., :keys]
    expected = torch.einsum("rhlgk,rhkd->rhlgd", probs, values).flatten(0, 2)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("block_size", [16, 160])
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_level_2_of_the_gpu(layout, block_size):
    """Attach the backend's classes to a layer, and call them as Runner V2 does."""
    case = Case(layout, 4, 2, 64, block_size, 3)
    layer = case.vllm_layer()
    assert GPURetrievalAttention.can_retrieve(layer)
    level2, given = case.level2_of(layer)
    output = torch.zeros_like(case.query)
    layer.impl.forward(*given, output)
    torch.testing.assert_close(output, case.expected(), **TOLERANCE)

    count = 40 * block_size // case.chunk
    found = {Summary.MEAN: QuantizedSummaries.allocate((1, 2, count, 64), DEVICE)}
    blocks = torch.arange(count, dtype=torch.int32, device=DEVICE)[None]
    ends = torch.tensor([[0], [count]], dtype=torch.int32, device=DEVICE)
    level2.update_summaries(found, blocks, *ends, count)
    chunks = case.cache[..., :64].float().unflatten(2, (-1, case.chunk))
    means = chunks.mean(3).transpose(0, 1).flatten(1, 2)
    kept = found[Summary.MEAN].dequantize(0, blocks[0])
    half_a_step = means.abs().amax(-1, keepdim=True) / 254 + 1e-4
    assert bool(((kept - means).abs() <= half_a_step).all())


@pytest.mark.parametrize("quantized", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_output_is_quantized_where_vllm_has_the_attention_do_it(quantized):
    """With ``fuse_attn_quant`` the compiled model reads 8 bits at this scale."""
    case = Case("head-major", 4, 2, 64, 16, 3)
    layer, scale = case.vllm_layer(), torch.tensor([0.05], device=DEVICE)
    _, given = case.level2_of(layer)
    output = torch.zeros(case.query.shape, dtype=quantized, device=DEVICE)
    layer.impl.forward(*given, output, scale)
    bounds = torch.finfo(quantized)
    expected = (case.expected().float() / scale).clamp(bounds.min, bounds.max)
    steps = 2.0 ** -(3 if quantized == torch.float8_e4m3fn else 2)
    torch.testing.assert_close(output.float(), expected, rtol=steps, atol=1e-1)
    with pytest.raises(ValueError, match="NVFP4"):
        layer.impl.forward(*given, output, scale, scale)


@pytest.mark.parametrize(
    ("of_layer", "dtype", "expected"),
    [
        (None, torch.bfloat16, FlashAttention(3)),  # a backend other than FlashAttention
        (None, torch.float32, triton_attention),
        (None, torch.uint8, triton_attention),
        (2, torch.bfloat16, FlashAttention(2)),
        (4, torch.bfloat16, triton_attention),
    ],
)
def test_flash_attention_is_taken_wherever_it_reads_the_cache(
    of_layer, dtype, expected, monkeypatch
):
    """vLLM's Triton kernel leaves most of a GPU idle at level 2."""
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    impl = object.__new__(TritonAttentionImpl if of_layer is None else FlashAttentionImpl)
    impl.head_size, impl.vllm_flash_attn_version = 64, of_layer
    assert kernel_for(impl, dtype) == expected


@pytest.mark.parametrize("is_ragged", [False, True])
def test_draft_on_the_gpu(is_ragged):
    case = Case("head-major", 4, 2, 64, 16, 3)
    case.tables = case.tables[:, :1].expand(-1, 2, -1)  # a sequence has all heads
    layer = case.vllm_layer()
    draft = GPUDraftAttention({"a layer": layer}, None)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE)
    tables = case.tables[:, 0].to(torch.int32).to(DEVICE)
    if is_ragged:
        starts = torch.arange(0, 12, 3, dtype=torch.int32, device=DEVICE)
        made = draft.ragged(starts, lens, tables, max(SEQ_LENS))
    else:
        made = draft.uniform(3, 3, lens, tables, max(SEQ_LENS))
    output = torch.zeros_like(case.query)
    layer.impl.forward(layer, case.query, None, None, case.cache, made["a layer"], output)
    torch.testing.assert_close(output, case.expected(), **TOLERANCE)


@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_fp8_kv_cache(layout):
    """Keys and values are stored in fp8 with scales."""
    case = Case(layout, 4, 2, 64, 16, 3)
    k_scale, v_scale = 0.5, 2.0
    scales = torch.tensor([k_scale] * 64 + [v_scale] * 64, device=DEVICE)
    stored = (case.cache.float() / scales).to(torch.float8_e4m3fn)
    case.cache = (stored.float() * scales).to(DTYPE)
    case.layer._k_scale, case.layer._v_scale = (
        torch.tensor([scale], device=DEVICE) for scale in (k_scale, v_scale)
    )
    case.impl.kv_cache_dtype = "fp8_e4m3"
    found = case.attend(triton_attention, cache=stored)
    torch.testing.assert_close(found, case.expected(), rtol=2e-2, atol=2e-2)
