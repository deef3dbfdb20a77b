"""Promise: each platform has its attention backend; level 2 and the draft attend over what they are
given, whoever computes it.

The matrix runs the attention of this machine's platform.
"""

import inspect

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import Platform, PlatformEnum, current_platform

from tests.kernels.oracles import attention
from tests.models import make_llama
from vllm_triforce.attention.platforms import attention_for
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.checks import check_platform
from vllm_triforce.core.models import private_cache
from vllm_triforce.selection import Summary

HERE = attention_for(current_platform)
ON_CPU = current_platform.is_cpu()
# Types and sizes of blocks: on a CPU keys lie in each in another way.
ENGINES = [("float32", 32), ("bfloat16", 64)] if ON_CPU else [("bfloat16", 32)]
# Query heads, KV heads, numbers in a head: of 80, vLLM's CPU build has another kernel.
GEOMETRIES = [(4, 2, 64), (3, 3, 32), (8, 1, 128), (4, 2, 80)]
# Tokens that each of three requests reads, the new ones included.
SEQ_LENS = [70, 3, 33]


def platform(kind: str) -> Platform:
    return type("Some", (Platform,), {"_enum": PlatformEnum[kind], "device_name": kind.lower()})()


@pytest.mark.parametrize("kind", ["CPU", "CUDA", "ROCM"])
def test_a_platform_has_its_attention(kind):
    check_platform(platform(kind))
    retrieval, draft = attention_for(platform(kind))
    name = "CPU" if kind == "CPU" else "GPU"
    assert retrieval.__name__.startswith(name) and not inspect.isabstract(retrieval)
    assert draft.__name__.startswith(name) and not inspect.isabstract(draft)


def test_a_platform_without_one_is_told_which_have():
    with pytest.raises(ValueError, match=r"platform 'tpu' yet; use vLLM on CUDA, .* or a CPU, or"):
        check_platform(platform("TPU"))


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def vllm_config(tmp_path_factory, request):
    dtype, block_size = request.param
    model = make_llama(tmp_path_factory.mktemp("attention") / "model")
    made = EngineArgs(
        model, dtype=dtype, block_size=block_size, skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"  # head-major; the engine's core chooses it
    return made


class Case:
    """Two layers whose caches are full of known keys and values, and three requests."""

    def __init__(self, vllm_config, geometry) -> None:
        torch.manual_seed(sum(geometry))
        self.num_heads, self.heads, self.dim = geometry
        vllm_config.compilation_config.static_forward_context.clear()
        self.device = torch.device(current_platform.device_type)
        self.dtype = vllm_config.model_config.dtype
        self.block_size = vllm_config.cache_config.block_size
        exact = self.dtype == torch.float32
        self.tolerance = dict(rtol=1e-4, atol=1e-4) if exact else dict(rtol=2e-2, atol=2e-2)
        with set_current_vllm_config(vllm_config):
            layers = {
                f"model.layers.{i}.attn": self.layer(f"model.layers.{i}.attn") for i in (0, 1)
            }
            config = TriForceConfig(num_recent_tokens=512).resolve(self.block_size)
            cache, self.builder = private_cache(layers, vllm_config, config, 3, self.device)
        self.by_name, self.layers = layers, list(layers.values())
        self.num_blocks = cache.num_blocks
        shape = (2, 2, self.num_blocks * self.block_size, self.heads, self.dim)
        self.keys, self.values = torch.randn(shape, dtype=self.dtype, device=self.device)
        """[num_layers, num_slots, num_kv_heads, head_dim]"""
        slots = torch.arange(self.num_blocks * self.block_size, device=self.device)
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def layer(self, name: str, **settings):
        scale = self.dim**-0.5
        return Attention(
            self.num_heads, self.dim, scale, num_kv_heads=self.heads, prefix=name, **settings
        )

    def tables(self, *shape: int) -> torch.Tensor:
        """Draw block tables [*shape, width], int32."""
        width = -(-max(SEQ_LENS) // self.block_size)
        drawn = [torch.randperm(self.num_blocks)[:width] for _ in range(torch.Size(shape).numel())]
        return torch.stack(drawn).view(*shape, width).to(torch.int32).to(self.device)

    def query(self, num_tokens: int) -> torch.Tensor:
        shape = (2, num_tokens, self.num_heads, self.dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def attend(self, query, metadata: list) -> torch.Tensor:
        """Run the layers' implementations, [num_layers, num_tokens, ...]."""
        output = torch.zeros_like(query)
        for i, layer in enumerate(self.layers):
            arguments = (self.keys[i, : query.shape[1]], self.values[i, : query.shape[1]])
            layer.impl.forward(layer, query[i], *arguments, layer.kv_cache, metadata[i], output[i])
        return output

    def expected(
        self,
        query: torch.Tensor,  # [num_layers, num_tokens, num_heads, head_dim]
        query_lens: list[int],
        tables: torch.Tensor,  # [num_layers, num_reqs, num_kv_heads, width]
    ) -> torch.Tensor:
        """Return attention spelled out, in float32."""

        def of_layer(layer: int) -> torch.Tensor:
            def gather(request: int, head: int):
                blocks = tables[layer, request, head].long()
                places = torch.arange(self.block_size, device=self.device)
                slots = blocks[:, None] * self.block_size + places
                slots = slots.flatten()[: SEQ_LENS[request]]
                return self.keys[layer, slots, head], self.values[layer, slots, head]

            return attention(query[layer], query_lens, SEQ_LENS, self.heads, gather)

        return torch.stack([of_layer(layer) for layer in range(2)])

    def ints(self, numbers) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


@pytest.fixture(params=GEOMETRIES, ids=str)
def case(request, vllm_config):
    return Case(vllm_config, request.param)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], [1, 3, 2]], ids=str)
def test_level_2_reads_the_blocks_of_each_head(case, query_lens):
    assert all(map(HERE.retrieval.can_retrieve, case.layers))
    level2 = HERE.retrieval(case.layers, case.builder)
    tables = case.tables(2, 3, case.heads)
    heads = torch.arange(case.heads, dtype=torch.int32, device=case.device)[:, None]
    named = level2.chunk_ids().of(tables, heads).flatten(1, 2)
    passes = []
    if len(set(query_lens)) == 1:
        lens = case.ints(SEQ_LENS).repeat_interleave(case.heads)
        passes.append(level2.uniform(3, query_lens[0], lens, named))
    if ON_CPU:
        passes.append(level2.build(case.ints(query_lens), case.ints(SEQ_LENS), named))
    query = case.query(sum(query_lens))
    expected = case.expected(query, query_lens, tables)
    for metadata in passes:
        torch.testing.assert_close(case.attend(query, metadata), expected, **case.tolerance)


def test_full_blocks_are_summarised(case):
    """Each kind, of the blocks from first to before last of each request, and no other."""
    level2 = HERE.retrieval(case.layers, case.builder)
    tables = torch.randperm(case.num_blocks)[:15].view(3, 5).to(torch.int32).to(case.device)
    first, last = [0, 2, 4], [3, 2, 5]
    shape = (2, case.heads, case.num_blocks, case.dim)
    summaries = {kind: QuantizedSummaries.allocate(shape, case.device) for kind in Summary}
    level2.update_summaries(summaries, tables, case.ints(first), case.ints(last), 3)
    blocks = [int(b) for table, a, z in zip(tables, first, last) for b in table[a:z]]
    keys = case.keys.float().unflatten(1, (-1, case.block_size))[:, blocks]
    for kind, kept in summaries.items():
        expected = torch.zeros(shape, device=case.device)
        expected[:, :, blocks] = kind.reduce(keys, 2).transpose(1, 2)
        every = torch.arange(case.num_blocks, device=case.device)
        found = torch.stack([kept.dequantize(layer, every) for layer in range(2)])
        half_a_step = expected.abs().amax(-1, keepdim=True) / 254 + 1e-4
        assert bool(((found - expected).abs() <= half_a_step).all())


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], SEQ_LENS], ids=str)
def test_the_draft_reads_its_windows(case, query_lens):
    draft = HERE.draft(case.by_name, case.builder)
    assert draft.layer_names == list(case.by_name)
    tables, lens = case.tables(3), case.ints(SEQ_LENS)
    if query_lens == SEQ_LENS:
        starts = [0, 70, 73, 106]
        made = draft.ragged(case.ints(starts), lens, tables, max(SEQ_LENS))
    else:
        made = draft.uniform(3, query_lens[0], lens, tables, max(SEQ_LENS))
    query = case.query(sum(query_lens))
    found = case.attend(query, [made[name] for name in case.by_name])
    every = tables[None, :, None].expand(2, -1, case.heads, -1)
    torch.testing.assert_close(found, case.expected(query, query_lens, every), **case.tolerance)


def test_a_layer_with_a_window_cannot_retrieve(case, vllm_config):
    with set_current_vllm_config(vllm_config):
        layer = case.layer("model.layers.2.attn", per_layer_sliding_window=64)
    assert not HERE.retrieval.can_retrieve(layer)
