"""Sizes of a model that decide the time of a pass."""

from dataclasses import dataclass, replace

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Keys of models whose passes read more than is counted here.
_UNCOUNTED = {
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantised weights",
    "ssm_state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "moe_num_experts": "ERNIE's mixture of experts",
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
        more_weights: numbers that a pass reads beside the layers and the output head: a head's
            first projection, and what an EAGLE-3 layer reads of the next token's embedding.
        bytes_each: bytes of a weight.
        kv_bytes_each: bytes of a number of the KV cache.
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
    more_weights: int = 0
    bytes_each: float = 2
    kv_bytes_each: int = 2

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
        return self.layers * layer + self.vocab * self.hidden + self.more_weights

    @property
    def weights(self) -> int:
        """All numbers but those of norms."""
        embedding = 0 if self.is_tied else self.vocab * self.hidden
        experts = self.layers * self.experts * self.expert_weights
        return self.dense_weights + embedding + experts

    @property
    def weight_bytes(self) -> float:
        return self.weights * self.bytes_each

    def experts_touched(self, num_tokens: int) -> float:
        """Expected experts of a layer that a pass reads, with even routing.

        A token leaves an expert out with probability ``1 - active_experts / experts``.
        """
        if not self.experts:
            return 0.0
        left_out = (1 - self.active_experts / self.experts) ** num_tokens
        return self.experts * (1 - left_out)

    @classmethod
    def from_config(
        cls, name: str, config: dict, dtype: str, kv_bytes_each: int | None = None
    ) -> "Geometry":
        """Read the sizes from a Hugging Face config.

        Args:
            config: content of config.json.
            dtype: vLLM's, of the weights.
            kv_bytes_each: bytes of a number of the KV cache; None if it has this dtype too.

        Raises:
            ValueError: the time of such a model is not predicted, or a size is missing.
        """
        text = config.get("text_config", config)
        for key, kind in _UNCOUNTED.items():
            if text.get(key) or config.get(key):
                raise ValueError(f"{name} has {key}: {kind} is not counted; use a model without")
        if dtype not in _BYTES:
            raise ValueError(f"{name} has dtype={dtype!r}; give --dtype, one of {list(_BYTES)}")
        try:
            heads, hidden = text["num_attention_heads"], text["hidden_size"]
            inner = text["intermediate_size"]
            expert_keys = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = next((text[key] for key in expert_keys if text.get(key)), 0)
            shared = text.get("shared_expert_intermediate_size") or 0
            if experts:
                inner = text.get("moe_intermediate_size") or inner
                shared = shared or inner * (text.get("n_shared_experts") or 0)
            return cls(
                name,
                hidden,
                text["num_hidden_layers"],
                heads,
                text.get("num_key_value_heads") or heads,
                text.get("head_dim") or hidden // heads,
                inner,
                text["vocab_size"],
                experts,
                text["num_experts_per_tok"] if experts else 0,
                shared,
                bool(text.get("tie_word_embeddings")),
                bytes_each=_BYTES[dtype],
                kv_bytes_each=kv_bytes_each or _BYTES[dtype],
            )
        except KeyError as error:
            raise ValueError(f"{name} has no {error}, which a decoder's sizes need") from error

    def as_head(self, draft_vocab: int | None, target_hidden: int | None = None) -> "Geometry":
        """Return the sizes of an EAGLE-3 head whose layer has these.

        It reads three of the target's states, and the target's embedding, which is not its own.

        Args:
            draft_vocab: tokens that it can draft; None for all.
            target_hidden: width of the target's states; None for the head's own.
        """
        projected = self.head_dim * (self.heads + 2 * self.kv_heads)
        return replace(
            self,
            vocab=draft_vocab or self.vocab,
            is_tied=True,
            more_weights=self.hidden * (3 * (target_hidden or self.hidden) + projected),
        )

    def as_mtp(self) -> "Geometry":
        """Return the sizes of the MTP layer of a target with these.

        It projects a state and an embedding to the layer's input. The embedding is the target's;
        the output head is counted as its own, as GLM's is.
        """
        return replace(self, layers=1, is_tied=True, more_weights=2 * self.hidden * self.hidden)
