"""Models of real geometry with random weights: vLLM needs a config.json (``load_format=dummy``).

python -m benchmarks.gpu.models FOLDER llama-3.1-8b      # its draft and its EAGLE-3 head
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.models import PAIR
from vllm_triforce_bench.predict.geometry import Geometry

_MAX_POSITIONS = 131_072
MODELS = {
    model.name: model
    for model in (
        Geometry("llama-2-7b-128k", 4096, 32, 32, 32, 128, 11008, 32000),
        Geometry("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        Geometry("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
        Geometry("smollm2-mha", 576, 30, 9, 9, 64, 1536, 49152, is_tied=True),
        Geometry("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, 128, 8),
    )
}
# Two layers with grouped queries, for one right answer.
SMOKE = Geometry("smoke", 256, 2, 4, 2, 64, 512, 4096)
SMOKE_DRAFT = Geometry("smoke-draft", 128, 1, 2, 2, 64, 256, 4096)


def draft_of(target: Geometry) -> Geometry:
    """Llama-68M, the paper's draft, with the target's vocabulary."""
    return Geometry("llama-68m", 768, 2, 12, 12, 64, 3072, target.vocab)


def write_head(target: Geometry, folder: Path) -> str:
    """Write an EAGLE-3 head's config: a layer of the target that drafts a quarter of its tokens."""
    layers = target.layers
    return write_model(
        target,
        folder,
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=target.vocab // 4,
        tie_word_embeddings=False,
        eagle_aux_hidden_state_layer_ids=sorted({1, layers // 2, max(1, layers - 3)}),
    )


def write_model(geometry: Geometry, folder: Path, **more: Any) -> str:
    """Write the config, and the embedded target's tokenizer; returns the folder."""
    is_qwen = geometry.name.startswith("qwen3")
    config = {
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_qwen else "llama",
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.inner,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "vocab_size": geometry.vocab,
        "tie_word_embeddings": geometry.is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in (PAIR / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(write_model(MODELS[name], Path(sys.argv[1]) / name))
        print(write_model(draft_of(MODELS[name]), Path(sys.argv[1]) / f"{name}-draft"))
        print(write_head(MODELS[name], Path(sys.argv[1]) / f"{name}-head"))
