"""Configs in place of the models that docs/recipes.md names: their shapes, without weights."""

import json
from pathlib import Path

from benchmarks.gpu.models import MODELS, write_head, write_model
from tests.models import speculators_config
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
            config = json.loads((head / "config.json").read_text())
            (head / "config.json").write_text(json.dumps(speculators_config(config, target)))
        written[name] = str(head)
    return written
