"""Sizes of a model that decide the time of a pass."""

from dataclasses import dataclass, replace

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Keys of models whose passes read more than is counted here.
_UNCOUNTED = {
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantised weights",
    "ssm_state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder whose layers are alike.

    Args:
        inner: width of the feed-forward network; of one expert in a mixture.
        experts: experts of each layer; 0 for a dense model.
        active_experts: experts of each token.
        shared_inner: width of the experts that every token passes.
        is_tied: True if the output head is the embedding.
        weight_bytes_each, kv_bytes_each: bytes of a number.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 0
    active_experts: int = 0
    shared_inner: int = 0
    is_tied: bool = False
    weight_bytes_each: int = 2
    kv_bytes_each: int = 2

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name!r} has {self.heads} heads and {self.kv_heads} KV heads; the "
                "former must be a multiple of the latter"
            )
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise ValueError(
                f"model {self.name!r} has {self.active_experts} active of {self.experts} experts; "
                "give between 1 and all"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_each

    @property
    def expert_weights(self) -> int:
        """Numbers of one expert of one layer."""
        return 3 * self.hidden * self.inner

    @property
    def dense_weights(self) -> int:
        """Numbers that every pass reads: all but the experts and the embedding's rows."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        inner = 0 if self.experts else self.inner
        layer = attention + 3 * self.hidden * (inner + self.shared_inner)
        layer += self.hidden * self.experts  # the router
        return self.layers * layer + self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """All numbers but those of norms."""
        embedding = 0 if self.is_tied else self.vocab * self.hidden
        experts = self.layers * self.experts * self.expert_weights
        return self.dense_weights + embedding + experts

    @property
    def weight_bytes(self) -> int:
        return self.weights * self.weight_bytes_each

    def experts_touched(self, num_tokens: int) -> float:
        """Expected experts of a layer that a pass reads, with even routing.

        A token leaves an expert out with probability ``1 - active_experts / experts``.
        """
        if not self.experts:
            return 0.0
        left_out = (1 - self.active_experts / self.experts) ** num_tokens
        return self.experts * (1 - left_out)

    def with_bytes(self, each: int) -> "Geometry":
        return replace(self, weight_bytes_each=each, kv_bytes_each=each)

    @classmethod
    def from_config(cls, name: str, config: dict, dtype: str | None = None) -> "Geometry":
        """Read the sizes from a Hugging Face config.

        Args:
            config: content of config.json.
            dtype: replaces the config's dtype.

        Raises:
            ValueError: the time of such a model is not predicted, or a size is missing.
        """
        text = config.get("text_config", config)
        for key, kind in _UNCOUNTED.items():
            if text.get(key) or config.get(key):
                raise ValueError(
                    f"{name} has {key}: {kind} is not counted; use a model without, or a preset "
                    "of nearly its sizes"
                )
        dtype = dtype or text.get("dtype") or text.get("torch_dtype") or "bfloat16"
        if dtype not in _BYTES:
            raise ValueError(f"{name} has dtype={dtype!r}; give --dtype, one of {list(_BYTES)}")
        try:
            return cls._from_text_config(name, text).with_bytes(_BYTES[dtype])
        except KeyError as error:
            raise ValueError(f"{name} has no {error}, which a decoder's sizes need") from error

    @classmethod
    def _from_text_config(cls, name: str, config: dict) -> "Geometry":
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        expert_keys = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((config[key] for key in expert_keys if config.get(key)), 0)
        inner = config["intermediate_size"]
        shared = config.get("shared_expert_intermediate_size") or 0
        if experts:
            inner = config.get("moe_intermediate_size") or inner
            shared = shared or inner * (config.get("n_shared_experts") or 0)
        return cls(
            name,
            hidden,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            inner,
            config["vocab_size"],
            experts,
            config["num_experts_per_tok"] if experts else 0,
            shared,
            bool(config.get("tie_word_embeddings")),
        )


MODELS = {
    model.name: model
    for model in (
        Geometry("llama-2-7b-128k", 4096, 32, 32, 32, 128, 11008, 32000),
        Geometry("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        Geometry("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
        Geometry("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, 128, 8),
    )
}


def draft_of(target: Geometry) -> Geometry:
    """Llama-68M, the paper's draft, with the target's vocabulary."""
    each = target.weight_bytes_each
    return Geometry("llama-68m", 768, 2, 12, 12, 64, 3072, target.vocab).with_bytes(each)
