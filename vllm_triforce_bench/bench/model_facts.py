"""What a model's config says: how long a prompt may be, how much memory a token takes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.settings import AUTO, DTYPES, GIB, Settings

_PINS = {"revision", "code_revision"}
_NOTHING: Mapping[str, Any] = {}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """What a model's configuration and files say of memory and context."""

    max_context: int | None
    kv_values_per_token: int
    """Keys and values of all layers."""
    weights_bytes: int
    """Of the files; 0 where they are not in a local folder."""

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_values_per_token * _BYTES[dtype]


def read_all(settings: Settings) -> tuple[ModelFacts, ModelFacts | None]:
    """The target's facts and the draft's, at the revisions that their engines will load.

    Raises:
        BadInput: there is no such model.
    """
    trust = bool(settings.engine_keys.get("trust_remote_code", False))
    target = read("--target", settings.target, trust, settings.engine_keys)
    if settings.draft is None:
        return target, None
    own = [settings.method_keys.get(name, {}) for name in ("triforce", "draft_model")]
    pinned = next((keys for keys in own if _PINS & keys.keys()), {})
    return target, read("--draft", settings.draft, trust, pinned)


def read(
    option: str, model: str, trust_remote_code: bool, pinned: Mapping[str, Any] = _NOTHING
) -> ModelFacts:
    """Reads a model's config; no weights.

    Args:
        pinned: keys of which ``revision`` and ``code_revision`` count: reading may run code.

    Raises:
        BadInput: there is no such model.
    """
    is_local = os.path.isabs(model) or model.startswith((".", "~")) or os.path.exists(model)
    if is_local and not os.path.isfile(os.path.join(model, "config.json")):
        raise BadInput(f"{option} {model}: not a folder with a config.json; name a model")
    from vllm.transformers_utils.config import get_config

    try:
        config = get_config(
            model,
            trust_remote_code=trust_remote_code,
            revision=pinned.get("revision"),
            code_revision=pinned.get("code_revision"),
        )
    except Exception as error:
        raise BadInput(f"{option} {model}: cannot be read ({error})") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelFacts(
        max_context=getattr(text, "max_position_embeddings", None),
        kv_values_per_token=2 * text.num_hidden_layers * kv_heads * head_dim,
        weights_bytes=sum(file.stat().st_size for file in Path(model).glob("*.safetensors")),
    )


def served_dtypes(model: str, dtypes: list[str], engine_keys: Mapping[str, Any]) -> list[str]:
    """Replace ``auto`` by the dtype in which vLLM serves the model.

    Raises:
        BadInput: the engine arguments are none of vLLM's, or the dtype is not measured.
    """
    if AUTO not in dtypes:
        return dtypes
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(model=model, **engine_keys).create_model_config()
    except (TypeError, ValueError) as error:
        raise BadInput(f"--engine with --target {model}: {error}") from error
    served = str(config.dtype).removeprefix("torch.")
    if served not in DTYPES:
        raise BadInput(f"--dtypes: vLLM serves {model} in {served}; use one of {DTYPES[1:]}")
    return list(dict.fromkeys(served if dtype == AUTO else dtype for dtype in dtypes))


def check_contexts(settings: Settings, target: ModelFacts) -> None:
    """Raises BadInput: a prompt and its output are longer than the model."""
    longest = max(settings.contexts) + settings.tokens
    if target.max_context is not None and settings.max_model_len > target.max_context:
        raise BadInput(
            f"--contexts {max(settings.contexts)} with --tokens {settings.tokens} is {longest} "
            f"tokens, and room for proposals; {settings.target} has {target.max_context} "
            f"positions: use contexts up to {target.max_context - settings.tokens - 64}"
        )


def kv_cache_bytes(settings: Settings, dtype: str, *models: ModelFacts) -> int:
    """KV cache of an engine: the largest batch of the longest prompts, and a tenth to spare.

    Args:
        models: those whose KV the engine's cache holds.
    """
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    return kv_bytes_of(max(settings.batch_sizes), settings.max_model_len, dtype, *models)


def kv_bytes_of(num_requests: int, max_model_len: int, dtype: str, *models: ModelFacts) -> int:
    """KV cache for as many requests of the greatest length, and a tenth to spare."""
    per_token = sum(model.kv_bytes_per_token(dtype) for model in models)
    # A block of up to 128 tokens may be half empty at the end of each request.
    tokens = num_requests * (max_model_len + 128)
    return max(64 << 20, int(1.1 * tokens * per_token))
