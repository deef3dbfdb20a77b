"""Small models for the tests: the embedded pair, and random ones of any geometry."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
PAIR = Path(os.environ.get("TRIFORCE_TEST_MODELS", ROOT / "examples" / "models"))
PROMPTS = ROOT / "examples" / "prompts"


def make_llama(
    folder: Path,
    *,
    vocab_size: int = 4096,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    std: float = 0.02,
    query_scale: float = 1.0,
    seed: int = 0,
    max_position_embeddings: int = 16384,
) -> str:
    """Save a randomly initialized Llama in float32; return its folder.

    Args:
        std: of the initial weights; larger is more peaked.
        query_scale: multiplies the query projections, so that attention picks and chooses.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=std,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).float()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(query_scale)
    model.save_pretrained(folder)
    return str(folder)


def make_head(
    folder: Path,
    target: str,
    *,
    draft_vocab: int,
    layers: tuple[int, ...] | None,
    seed: int = 0,
    **keys,
) -> str:
    """Save a random EAGLE-3 head for a Llama, as ``LlamaForCausalLMEagle3``; return its folder.

    It has the target's embeddings, and drafts tokens 1, 3, 5, ... where it has a smaller
    vocabulary.

    Args:
        layers: those before which the target's states are read; None for what ``keys`` say.
        keys: further keys of its config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (hidden, len(layers or ()) * hidden),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden),
    }
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 1.5 * max(1, shape[1]) ** -0.5
        for name, shape in shapes.items()
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(hidden)
    keys = {"eagle_aux_hidden_state_layer_ids": layers, **keys}
    if draft_vocab < config.vocab_size:
        weights["d2t"] = torch.arange(draft_vocab) + 1
        assert 2 * draft_vocab <= config.vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {
        **config.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        **keys,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def as_speculators(folder: Path, head: str, target: str) -> str:
    """Save a head of ``make_head`` as the library speculators does; return its folder."""
    config = json.loads((Path(head) / "config.json").read_text())
    weights = load_file(Path(head) / "model.safetensors")
    layer = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    vocab = torch.zeros(config["vocab_size"], dtype=torch.bool)
    vocab[torch.arange(config["draft_vocab_size"]) + weights.get("d2t", 0)] = True
    folder.mkdir(parents=True)
    save_file(layer | {"t2d": vocab}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(speculators_config(config, target)))
    return str(folder)


def speculators_config(config: dict, target: str) -> dict:
    """Return a head's config in the form of the library speculators."""
    layer = dict(config)
    top_level = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        **{name: layer.pop(name) for name in top_level},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }


def make_mimo(folder: Path, **llama) -> str:
    """Save a random MiMo with one MTP layer; return its folder.

    Its class of config is that of Qwen2, from which MiMo's is derived. All biases are zero, so it
    is a Llama as well.

    Args:
        llama: of ``make_llama()``.
    """
    make_llama(folder, hidden_size=128, num_heads=4, head_dim=32, **llama)  # Qwen2: 128 / 4
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(llama.get("seed", 0) + 1)
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        stem = name.removeprefix("model.layers.0.")
        weights[f"model.mtp_layers.0.{stem}"] = weights[name].clone()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(hidden)
    mixed = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    weights["model.mtp_layers.0.input_proj.weight"] = mixed
    with_bias = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    for name in [name for name in weights if name.endswith(with_bias)]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def add_mtp_layer(folder: str) -> None:
    """Add a random MTP layer to a saved Qwen3.5, whose attention is that of its layer 1."""
    path = Path(folder) / "model.safetensors"
    weights = load_file(path)
    stem = "model.layers.1."
    layer = {name.removeprefix(stem): w for name, w in weights.items() if name.startswith(stem)}
    weights |= {f"mtp.layers.0.{name}": weight.clone() for name, weight in layer.items()}
    norm = weights["model.norm.weight"]
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros_like(norm)  # its norms scale by 1 + weight
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(len(norm), 2 * len(norm), generator=generator)
    weights["mtp.fc.weight"] = mixed * (2 * len(norm)) ** -0.5
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(folder) / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


def held_out_tokens(num_tokens: int) -> list[int]:
    """Return the embedded pair's token ids of real text that it has not seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    text = (PROMPTS / "held_out.txt").read_text()
    ids = tokenizer(text[: 8 * num_tokens])["input_ids"]
    assert len(ids) >= num_tokens, "the held-out text is too short"
    return ids[:num_tokens]


def make_int8(folder: Path, model: str) -> str:
    """Save a model with 8-bit weights and activations, in compressed-tensors' form."""
    shutil.copytree(model, folder)
    weights = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() == 2 and "_proj" in name:
            scale = value.float().abs().amax(1, keepdim=True) / 127
            weights[f"{name}_scale"] = scale
            value = (value.float() / scale).round().to(torch.int8)
        weights[name] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    eight_bits = dict(num_bits=8, type="int", symmetric=True)
    group = dict(
        targets=["Linear"],
        weights=dict(eight_bits, strategy="channel", dynamic=False),
        input_activations=dict(eight_bits, strategy="token", dynamic=True),
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors",
        format="int-quantized",
        quantization_status="compressed",
        config_groups={"group_0": group},
        ignore=["lm_head"],
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_adapter(
    folder: Path,
    model: str,
    *,
    seed: int,
    scale: float = 0.3,
    rank: int = 4,
    with_head: bool = False,
) -> str:
    """Save a random LoRA adapter of a Llama's attention and MLP, in PEFT's form.

    Args:
        with_head: of ``lm_head`` as well, which must not be tied to the embeddings.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads, head_dim = config.num_attention_heads, config.head_dim
    sizes = {
        "self_attn.q_proj": (config.hidden_size, heads * head_dim),
        "self_attn.k_proj": (config.hidden_size, config.num_key_value_heads * head_dim),
        "self_attn.v_proj": (config.hidden_size, config.num_key_value_heads * head_dim),
        "self_attn.o_proj": (heads * head_dim, config.hidden_size),
        "mlp.down_proj": (config.intermediate_size, config.hidden_size),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    modules = {
        f"model.layers.{layer}.{name}": size
        for layer in range(config.num_hidden_layers)
        for name, size in sizes.items()
    }
    if with_head:
        modules["lm_head"] = (config.hidden_size, config.vocab_size)
    for module, (inputs, outputs) in modules.items():
        stem = f"base_model.model.{module}"
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, rank, generator=generator) * scale
        weights |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    names = sorted({name.split(".")[-1] for name in modules})
    adapter = dict(peft_type="LORA", r=rank, lora_alpha=rank, target_modules=names, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)


def with_adapter(model: torch.nn.Module, folder: str) -> torch.nn.Module:
    """Add an adapter of ``make_adapter`` to the weights of a model of transformers."""
    weights = load_file(Path(folder) / "adapter_model.safetensors")
    for name, a in weights.items():
        if ".lora_A." in name:
            b = weights[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            own = model.get_submodule(module).weight.data
            own += b.to(own.dtype) @ a.to(own.dtype)
    return model


# Keys of a tiny config, by architecture; layers with and without a sliding window alternate
# where the architecture has both.
_TINY = dict(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    initializer_range=0.1,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
_WINDOWS = dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=64)
# Heads of full layers are twice as long. Their keys are the values too, and the fewer KV heads make
# their KV blocks twice those of window layers.
_GEMMA4 = _WINDOWS | dict(
    tie_word_embeddings=True,
    vocab_size_per_layer_input=4096,
    hidden_size_per_layer_input=16,
    global_head_dim=64,
)
_FOUR_EXPERTS = {**_EXPERTS, "num_local_experts": 4}
# Latent vectors and heads of the sizes that kernels of GPUs take.
_DEEPSEEK = dict(
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    head_dim=64,
    first_k_dense_replace=4,
    mlp_layer_types=["dense"] * 4,
)
# vLLM's CPU build lacks the router of its experts.
_LAGUNA = dict(num_attention_heads_per_layer=[8, 4, 8, 4], mlp_layer_types=["dense"] * 4)
# With softmax in the place of sigmoid, whose router vLLM's CPU build lacks.
_MINIMAX = dict(rotary_dim=16, scoring_func="softmax", use_routing_bias=True)
# A recurrent state takes a KV block, which is then larger than a chunk.
_GATED_DELTA_NETS = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
_STATE_SPACE = dict(  # of Granite
    layer_types=["linear_attention", "full_attention"] * 2,
    num_local_experts=0,
    shared_intermediate_size=256,
    attention_multiplier=0.2,
    **dict(mamba_n_heads=4, mamba_d_state=32, mamba_chunk_size=64),
)
_NEMOTRON = dict(
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
    **dict(ssm_state_size=32, mamba_num_heads=4, n_groups=2, chunk_size=64),
)
_SHARED_KV = dict(num_hidden_layers=6, layer_types=_WINDOWS["layer_types"][:2] * 3)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "apertus": ("apertus", {}),
    "cohere2": ("cohere2", _WINDOWS),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5-moe": ("ernie4_5_moe", dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64)),
    "exaone4": ("exaone4", _WINDOWS),
    "exaone-moe": ("exaone_moe", {**_WINDOWS, **_EXPERTS, "num_experts": 4}),
    "gemma2": ("gemma2", {**_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 32}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "deepseek-v2": ("deepseek_v2", _DEEPSEEK),
    "gemma4": (
        "gemma4_text",
        _GEMMA4 | dict(num_key_value_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True),
    ),
    # The last two layers read the KV cache of those before them.
    "gemma4-shared": ("gemma4_text", {**_GEMMA4, **_SHARED_KV, "num_kv_shared_layers": 2}),
    "glm4": ("glm4", {}),
    "glm4-moe": (
        "glm4_moe",
        {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True},
    ),
    "gpt-oss": ("gpt_oss", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", {}),
    "granite-hybrid": ("granitemoehybrid", _STATE_SPACE),
    "granite-windows": ("granite_swa", _WINDOWS),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "laguna": ("laguna", _WINDOWS | _LAGUNA),
    "minimax-m2": ("minimax_m2", _FOUR_EXPERTS | _MINIMAX),
    "ministral": ("ministral", _WINDOWS),
    "ministral3": ("ministral3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron-h": ("nemotron_h", _NEMOTRON),
    "olmo3": ("olmo3", _WINDOWS),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3.5": ("qwen3_5_text", _GATED_DELTA_NETS),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "initializer_range": 0.2}),
    "seed-oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
}


def make_architecture(folder: Path, name: str, *, query_scale: float = 4.0, **changes) -> str:
    """Save a tiny randomly initialized model of one of ``ARCHITECTURES`` in float32.

    Args:
        changes: further keys of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, keys = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_TINY, **keys, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "q_proj.weight" in parameter_name:
            parameter.data.mul_(query_scale)
        if parameter_name.endswith("sinks"):
            parameter.data.normal_(std=3)
        if parameter_name.endswith("mamba.dt_bias"):
            parameter.data.fill_(-3)  # or its state would forget a token after two
        if config.tie_word_embeddings and parameter.dim() == 2 and "embed" in parameter_name:
            # Or the model would repeat its last token for ever.
            parameter.data.mul_(0.05)
    model.save_pretrained(folder)
    return str(folder)
