"""Promise: level 2's passes see the recurrent states of the tokens that were accepted, by the full
pass and by level 2 itself, and write to none of the full pass's."""

import importlib.util
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from tests.kernels.device import DEVICE
from tests.kernels.tensors import init_rows, some_rows
from vllm_triforce.core.kv_groups import KVGroup
from vllm_triforce.runner_v2.recurrent import RecurrentLayers

K_HEADS, V_HEADS, DIM, WIDTH = 1, 2, 16, 4
NUM_SPEC = 2
CONV_DIM = 2 * K_HEADS * DIM + V_HEADS * DIM
NUM_BLOCKS = 40


def conv1d_on_a_gpu():
    """Load vLLM's Triton kernel, in whose place the CPU build puts an operator of its own."""
    spec = importlib.util.find_spec("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(type(current_platform), "is_cpu", lambda self: False):
        spec.loader.exec_module(module)
    return module.causal_conv1d_update


class Layer(QwenGatedDeltaNetAttention):
    """vLLM's layer without its projections."""

    def __init__(self, seed: int) -> None:
        nn.Module.__init__(self)
        self.prefix, self.activation, self.tp_size = f"net {seed}", "silu", 1
        self.num_k_heads, self.num_v_heads = K_HEADS, V_HEADS
        self.head_k_dim = self.head_v_dim = DIM
        self.key_dim, self.value_dim = K_HEADS * DIM, V_HEADS * DIM
        self.conv_kernel_size, self.num_spec = WIDTH, NUM_SPEC
        self.enable_packed_recurrent_decode = False
        draw = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw).to(DEVICE), requires_grad=False)

        self.conv1d = SimpleNamespace(weight=parameter(CONV_DIM, 1, WIDTH), bias=None)
        self.A_log, self.dt_bias = parameter(V_HEADS), parameter(V_HEADS)
        self.kv_cache = tuple(
            torch.zeros(NUM_BLOCKS, *shape, device=DEVICE) for shape in self.get_state_shape()
        )

    def get_state_dtype(self):
        return torch.float32, torch.float32


def attend(layer, metadata, tokens: list[int], monkeypatch) -> torch.Tensor:
    """Run a layer over tokens, each a row of random numbers."""
    context = SimpleNamespace(attn_metadata={layer.prefix: metadata})
    monkeypatch.setattr(qwen_gdn_linear_attn, "get_forward_context", lambda: context)
    inputs = [inputs_of(token) for token in tokens]
    mixed, b, a = (torch.stack(part).to(DEVICE) for part in zip(*inputs))
    output = torch.zeros(len(tokens), V_HEADS, DIM, device=DEVICE)
    layer._forward_core(mixed, b, a, output)
    return output


def inputs_of(token: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(token)
    return tuple(torch.randn(size, generator=draw) for size in (CONV_DIM, V_HEADS, V_HEADS))


def expected(layer, tokens: list[int]) -> torch.Tensor:  # [num_tokens, num_v_heads, dim]
    """Compute the gated delta rule token by token (arXiv 2412.06464, equation 10)."""
    weight = layer.conv1d.weight.cpu()[:, 0]
    state, outputs = torch.zeros(V_HEADS, DIM, DIM), []  # [head, value, key]
    mixed = torch.stack([inputs_of(token)[0] for token in tokens])
    padded = F.pad(mixed, (0, 0, WIDTH - 1, 0))
    for place, token in enumerate(tokens):
        _, b, a = inputs_of(token)
        x = F.silu((padded[place : place + WIDTH].T * weight).sum(1))
        query, key, value = x.split([K_HEADS * DIM, K_HEADS * DIM, V_HEADS * DIM])
        query, key = (F.normalize(part.view(K_HEADS, DIM), dim=-1) for part in (query, key))
        query, key = (part.repeat_interleave(V_HEADS // K_HEADS, 0) for part in (query, key))
        decay = torch.exp(-layer.A_log.cpu().exp() * F.softplus(a + layer.dt_bias.cpu()))
        state = state * decay[:, None, None]
        known = torch.einsum("hvk,hk->hv", state, key)
        change = (value.view(V_HEADS, DIM) - known) * b.sigmoid()[:, None]
        state = state + change[:, :, None] * key[:, None]
        outputs.append(torch.einsum("hvk,hk->hv", state, query) * DIM**-0.5)
    return torch.stack(outputs)


class Batch(NamedTuple):
    """What is read of a batch of two rows."""

    tables: list[torch.Tensor]

    def __len__(self) -> int:
        return 2


def full_pass(table: torch.Tensor, num_accepted: list[int], length: int) -> GDNAttentionMetadata:
    """Make the metadata of a full pass over ``length`` tokens a row, as vLLM's builder."""
    count = len(table)
    numbers = torch.arange(count * length, dtype=torch.int32, device=DEVICE)
    return GDNAttentionMetadata(
        *(0, 0, 0, 0),
        num_spec_decodes=count,
        num_spec_decode_tokens=count * length,
        num_actual_tokens=count * length,
        spec_query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length,
        spec_state_indices_tensor=table,
        spec_sequence_masks=torch.ones(count, dtype=torch.bool, device=DEVICE),
        spec_token_indx=numbers,
        non_spec_token_indx=numbers[:0],
        num_accepted_tokens=torch.tensor(num_accepted, dtype=torch.int32, device=DEVICE),
    )


# With drafts of level 1 as many as the full pass verifies, and more.
@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("aligned", [False, True], ids=["", "prefix caching"])
def test_passes_resume_from_the_last_accepted_token(aligned, gamma, monkeypatch):
    monkeypatch.setattr(qwen_gdn_linear_attn, "causal_conv1d_update", conv1d_on_a_gpu())
    layers = {f"net {n}": Layer(n) for n in range(3)}
    groups = [
        KVGroup(16, [], [], ["net 2"]),
        KVGroup(16, ["attention"], []),
        KVGroup(16, [], [], ["net 0", "net 1"]),
    ]
    first = 2 if aligned else 0
    tables = [
        torch.randperm(NUM_BLOCKS - 1)[: 2 * 8].view(2, 8).to(torch.int32).to(DEVICE) + 1
        for _ in groups
    ]
    group_of = {"net 2": 0, "net 0": 2, "net 1": 2}
    rows = some_rows(2, gamma)
    # Two full passes: of the first all tokens stay, of the second one and three.
    accepted = [1, 3]
    for tokens, before in (([1, 2, 3, 4, 5, 6], [1, 1]), ([7, 8, 9, 10, 11, 12], [3, 3])):
        for name, layer in layers.items():
            table = tables[group_of[name]][:, first : first + NUM_SPEC + 1].contiguous()
            attend(layer, full_pass(table, before, 3), tokens, monkeypatch)
    histories = [[1, 2, 3, 7], [4, 5, 6, 10, 11, 12]]
    kept = [[state.clone() for state in layer.kv_cache] for layer in layers.values()]

    model_state = SimpleNamespace(
        num_accepted_tokens_gpu=torch.tensor(accepted, dtype=torch.int32, device=DEVICE),
        _align_mode=aligned,
        _mamba_state_idx_gpu=torch.full((2,), first, dtype=torch.int32, device=DEVICE),
    )
    level2 = RecurrentLayers(layers, layers, groups, rows, model_state, DEVICE)
    init_rows(rows, [100, 100])
    level2.begin(Batch(tables))
    # A pass of the newest token and its drafts, of which none and two stay, then another.
    length = gamma + 1
    for newest, drafts, emitted in (
        ([20, 21], [[30, 31, 38], [32, 33, 39]], [1, 3]),
        ([22, 23], [[34, 35, 40], [36, 37, 41]], [2, 1]),
    ):
        level2.begin_pass()
        tokens = [token for row in range(2) for token in (newest[row], *drafts[row][:gamma])]
        for name, own in level2.layers.items():
            found = attend(own, level2.metadata(2), tokens, monkeypatch).cpu()
            for row in range(2):
                of_row = slice(length * row, length * (row + 1))
                wanted = expected(layers[name], histories[row] + tokens[of_row])[-length:]
                torch.testing.assert_close(found[of_row], wanted, rtol=1e-3, atol=1e-4)
        for row, count in enumerate(emitted):
            histories[row] = histories[row] + tokens[length * row : length * row + count]
        rows.length[:2] += torch.tensor(emitted, dtype=torch.int32, device=DEVICE)
        rows.num_emitted[:2] = torch.tensor(emitted, dtype=torch.int32, device=DEVICE)
    after = [list(layer.kv_cache) for layer in layers.values()]
    assert all(torch.equal(a, b) for of, before in zip(after, kept) for a, b in zip(of, before))
