"""Sizes of a model that decide the time of a pass."""

from dataclasses import dataclass, replace

from vllm_triforce.config.check_draft import is_head, is_mtp


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
    def read(cls, config, kv_bytes_each: int | None = None) -> "Geometry":
        """Read the sizes from vLLM's ``ModelConfig``.

        Args:
            kv_bytes_each: bytes of a number of the KV cache; None if it has the weights' dtype.

        Raises:
            ValueError: the time of such a model is not predicted, or a size is missing.
        """
        sizes = config.model_arch_config

        def more(name: str) -> int:
            return getattr(config.hf_text_config, name, None) or 0

        if config.quantization is not None:
            raise ValueError(
                f"{config.model} has quantized weights ({config.quantization}), which are not "
                "counted; use a model without"
            )
        inner, shared = more("intermediate_size"), 0
        if sizes.num_experts:
            inner = more("moe_intermediate_size") or inner
            shared = more("shared_expert_intermediate_size") or inner * more("n_shared_experts")
        if not inner or (sizes.num_experts and not sizes.num_experts_per_token):
            raise ValueError(
                f"{config.model} ({sizes.model_type}) names no width of its feed-forward network, "
                "or no number of experts for a token, so its weights are not counted"
            )
        return cls(
            config.model,
            sizes.hidden_size,
            sizes.total_num_hidden_layers,
            sizes.total_num_attention_heads,
            sizes.total_num_kv_heads,
            sizes.head_size,
            inner,
            sizes.vocab_size,
            sizes.num_experts,
            sizes.num_experts_per_token if sizes.num_experts else 0,
            shared,
            bool(more("tie_word_embeddings")),
            bytes_each=config.dtype.itemsize,
            kv_bytes_each=kv_bytes_each or config.dtype.itemsize,
        )

    @classmethod
    def read_draft(cls, config) -> "Geometry":
        """Read the sizes of a draft model, an EAGLE-3 head or an MTP layer.

        Raises:
            ValueError: the time of such a model is not predicted, or a size is missing.
        """
        sizes, hf_config = cls.read(config), config.hf_config
        if is_mtp(hf_config):
            # It projects a state and an embedding to the layer's input. The embedding is the
            # target's; the output head is counted as its own, as GLM's is.
            return replace(sizes, layers=1, is_tied=True, more_weights=2 * sizes.hidden**2)
        if not is_head(hf_config):
            return sizes
        return sizes.as_head(
            getattr(hf_config, "draft_vocab_size", None) or sizes.vocab,
            getattr(hf_config, "target_hidden_size", None) or sizes.hidden,
        )

    def as_head(self, vocab: int, target_hidden: int) -> "Geometry":
        """Return an EAGLE-3 head with these layers; it reads three states of the target.

        The embedding is the target's.
        """
        inputs = 3 * target_hidden + self.head_dim * (self.heads + 2 * self.kv_heads)
        return replace(self, vocab=vocab, is_tied=True, more_weights=self.hidden * inputs)
