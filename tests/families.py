"""Small random models of families that vLLM has and transformers cannot make, by their tensors.

Their configs are those of the published checkpoints, at a tiny size. Layers of two kinds of
attention alternate as in ``tests/models.py``.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INNER, VOCAB, HEAD_DIM, NUM_HEADS = 4, 4, 128, 64, 4096, 32, 4
_COMMON = dict(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    moe_intermediate_size=INNER,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=NUM_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=16384,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
_KINDS = ["sliding_attention", "full_attention"] * 2
Shapes = dict[str, tuple[int, ...]]


def _attention(layer: str, num_heads: int, num_kv_heads: int) -> Shapes:
    q, kv = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    shapes = {"q_proj": (q, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN)}
    shapes["o_proj"] = (HIDDEN, q)
    return {f"{layer}.self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(name: str, *stacked: int) -> Shapes:
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN)}
    shapes["down_proj"] = (HIDDEN, INNER)
    return {f"{name}.{part}.weight": (*stacked, *shape) for part, shape in shapes.items()}


def _stacked_experts(layer: str) -> Shapes:
    """Return Step's experts, one tensor for all, beside one that every token passes."""
    gate = {f"{layer}.moe.gate.weight": (NUM_EXPERTS, HIDDEN)}
    return gate | _mlp(f"{layer}.moe", NUM_EXPERTS) | _mlp(f"{layer}.share_expert")


def _step3() -> tuple[dict, Shapes]:
    """Return Step-3's text model: all query heads share one KV head."""
    shapes: Shapes = {}
    for layer in (f"model.layers.{i}" for i in range(NUM_LAYERS)):
        shapes |= _attention(layer, NUM_HEADS, 1)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (64, HIDDEN)
        shapes[f"{layer}.self_attn.inter_norm.weight"] = (64,)
        shapes[f"{layer}.self_attn.wq.weight"] = (NUM_HEADS * HEAD_DIM, 64)
        shapes |= _mlp(f"{layer}.mlp") if layer.endswith(".0") else _stacked_experts(layer)
    keys = dict(architectures=["Step3TextForCausalLM"], model_type="step3_text", share_q_dim=64)
    experts = dict(moe_num_experts=NUM_EXPERTS, moe_top_k=2, share_expert_dim=INNER)
    experts |= dict(moe_layers_enum="1,2,3", norm_expert_weight=True)
    return keys | experts | dict(num_attention_groups=1, max_position_embedding=4096), shapes


def _step3p5() -> tuple[dict, Shapes]:
    """Return Step-3.5: window layers have twice the query heads."""
    shapes: Shapes = {}
    for i, kind in enumerate(_KINDS):
        layer = f"model.layers.{i}"
        num_heads = NUM_HEADS if kind == "full_attention" else 2 * NUM_HEADS
        shapes |= _attention(layer, num_heads, 2)
        shapes[f"{layer}.self_attn.g_proj.weight"] = (num_heads, HIDDEN)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{name}.weight"] = (HEAD_DIM,)
        shapes |= _stacked_experts(layer) if i else _mlp(f"{layer}.mlp")
        if i:
            shapes[f"{layer}.moe.router_bias"] = (NUM_EXPERTS,)
    other = dict(attention_type=_KINDS[0], num_attention_heads=2 * NUM_HEADS)
    keys = dict(
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        num_attention_groups=2,
        layer_types=_KINDS,
        sliding_window=64,
        attention_other_setting=other | dict(num_attention_groups=2, head_dim=HEAD_DIM),
        use_head_wise_attn_gate=True,
        partial_rotary_factors=[1.0, 0.5] * 2,
        moe_layers_enum="1,2,3",
        moe_num_experts=NUM_EXPERTS,
        moe_top_k=2,
        share_expert_dim=INNER,
        num_nextn_predict_layers=3,  # MTP layers, whose weights the target does not load
        moe_router_activation="softmax",  # vLLM's CPU build has sigmoid with groups only
    )
    return keys, shapes


def _mimo_v2() -> tuple[dict, Shapes]:
    """Return MiMo-V2: window layers have attention sinks and twice the KV heads.

    Values of the published models have fewer dimensions than keys, which vLLM's CPU build lacks.
    """
    shapes: Shapes = {}
    for i, kind in enumerate(_KINDS):
        layer = f"model.layers.{i}"
        shapes |= _attention(layer, NUM_HEADS, 2 if kind == "full_attention" else 4)
        if kind != "full_attention":
            shapes[f"{layer}.self_attn.attention_sink_bias"] = (NUM_HEADS,)
        if i == 0:
            shapes |= _mlp(f"{layer}.mlp")
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (NUM_EXPERTS, HIDDEN)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (NUM_EXPERTS,)
        for expert in range(NUM_EXPERTS):
            shapes |= _mlp(f"{layer}.mlp.experts.{expert}")
    keys = dict(
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="mimo_v2_flash",
        num_key_value_heads=2,
        v_head_dim=HEAD_DIM,
        swa_num_attention_heads=NUM_HEADS,
        swa_num_key_value_heads=4,
        swa_head_dim=HEAD_DIM,
        swa_v_head_dim=HEAD_DIM,
        sliding_window=64,
        sliding_window_size=64,
        add_swa_attention_sink_bias=True,
        attention_value_scale=0.7,
        layer_types=_KINDS,
        hybrid_layer_pattern=[1, 0, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        partial_rotary_factor=0.5,
        rope_theta=1e6,
        swa_rope_theta=1e4,
        layernorm_epsilon=1e-5,
    )
    return keys, shapes


FAMILIES: dict[str, Callable[[], tuple[dict, Shapes]]] = {
    "step3": _step3,
    "step3p5": _step3p5,
    "mimo-v2": _mimo_v2,
}


def make_family(folder: Path, name: str, vocab_size: int = VOCAB) -> str:
    """Save a random model of one of ``FAMILIES`` in float32; return its folder."""
    keys, shapes = FAMILIES[name]()
    for i in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    for matrix in ("model.embed_tokens", "lm_head"):
        shapes[f"{matrix}.weight"] = (vocab_size, HIDDEN)
    # Norms of Step-3.5 add one to their weights.
    norm = torch.zeros if name == "step3p5" else torch.ones
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: norm(shape) if "norm" in key else 0.1 * torch.randn(shape, generator=generator)
        for key, shape in shapes.items()
    }
    for key, weight in weights.items():
        # So that attention picks and chooses, and sinks take a part that differs by head.
        weight.mul_({"q_proj": 4, "wq": 4, "attention_sink_bias": 30}.get(_part(key), 1))
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_COMMON | keys | {"vocab_size": vocab_size}))
    return str(folder)


def _part(key: str) -> str:
    """Return the last part of a tensor's name that names a module or parameter."""
    return key.removesuffix(".weight").split(".")[-1]
