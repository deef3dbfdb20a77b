"""Models of real geometry with random weights: a config.json is all vLLM needs (``dummy``)."""

import json
from dataclasses import dataclass
from pathlib import Path

BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model whose weights are random."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    positions: int
    theta: float
    model_type: str = "llama"
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def weight_bytes(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner
        return BYTES * (self.layers * layer + 2 * self.vocab * self.hidden)

    def fits(self, context: int, batch: int, memory_bytes: float) -> bool:
        """Whether weights and the KV cache of a batch fit, with a tenth and 6 GB to spare."""
        kv = context * batch * self.kv_bytes_per_token
        return self.weight_bytes + kv + 6e9 < 0.9 * memory_bytes

    def write(self, folder: Path) -> str:
        """Makes a model folder with no weights and no tokenizer; returns it."""
        qwen = self.model_type == "qwen3"
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        return str(folder)


GEOMETRIES = {
    "llama-2-7b-128k": Geometry(4096, 32, 32, 32, 11008, 32000, 131072, 1e4),
    "llama-3.1-8b": Geometry(4096, 32, 32, 8, 14336, 128256, 131072, 5e5),
    "qwen3-8b": Geometry(4096, 36, 32, 8, 12288, 151936, 131072, 1e6, "qwen3"),
    "smoke": Geometry(256, 2, 4, 2, 512, 1024, 8192, 1e4, head_dim=64),
    "tiny": Geometry(128, 2, 4, 2, 256, 512, 8192, 1e4, head_dim=32),
}


def draft_of(target: Geometry) -> Geometry:
    """Llama-68M, the paper's draft, with the target's vocabulary."""
    if target.hidden < 1024:
        size = target.head_dim
        return Geometry(2 * size, 1, 2, 2, 4 * size, target.vocab, 2048, 1e4, head_dim=size)
    return Geometry(768, 2, 12, 12, 3072, target.vocab, 2048, 1e4, head_dim=64)
