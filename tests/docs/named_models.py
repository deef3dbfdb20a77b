"""Configs in place of the models that docs/recipes.md names: their shapes, without weights."""

import json
from pathlib import Path

from benchmarks.gpu.models import MODELS, write_head, write_model
from vllm_triforce_bench.predict.geometry import Geometry

# Shapes by name: layers, heads, KV heads and widths as in the config of each on the hub.
TARGETS = {
    "meta-llama/Llama-3.1-8B-Instruct": MODELS["llama-3.1-8b"],
    "Qwen/Qwen3-8B": MODELS["qwen3-8b"],
    "openai/gpt-oss-20b": Geometry("gpt-oss-20b", 2880, 24, 64, 8, 64, 2880, 201088, 32, 4),
    "build/smollm2/gqa": Geometry("smollm2", 576, 30, 9, 3, 64, 1536, 49152, is_tied=True),
}
HEADS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "Qwen/Qwen3-8B",
    "RedHatAI/gpt-oss-20b-speculator.eagle3": "openai/gpt-oss-20b",
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def write_named_models(folder: Path) -> dict[str, str]:
    """Write the configs; return the folder of each name."""
    written = {}
    for name, shape in TARGETS.items():
        more = _GPT_OSS if shape.name == "gpt-oss-20b" else {}
        written[name] = write_model(shape, folder / shape.name, **more)
    for name, target in HEADS.items():
        shape = TARGETS[target]
        head = Path(write_head(shape, folder / f"{shape.name}-head"))
        if "speculator" in name:
            _as_speculators(head / "config.json", target)
        written[name] = str(head)
    return written


def _as_speculators(path: Path, target: str) -> None:
    """Rewrite a head's config in the form of the library speculators."""
    layer = json.loads(path.read_text())
    top_level = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **{name: layer.pop(name) for name in top_level},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }
    path.write_text(json.dumps(config))
