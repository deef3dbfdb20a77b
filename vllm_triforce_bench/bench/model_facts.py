"""Context and memory of a model, from its config; no weights are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench import BadInput
from vllm_triforce_bench.bench.settings import AUTO, DTYPES, GIB, Settings

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Context and memory of a model.

    Args:
        kv_values_per_token: keys and values of all layers.
        weights_bytes: bytes of the weight files; 0 without a local folder.
    """

    max_context: int | None
    kv_values_per_token: int
    weights_bytes: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_values_per_token * _BYTES[dtype]


def read_all(
    target: str,
    draft: str | None,
    engine_keys: Mapping[str, Any],
    draft_keys: Mapping[str, Any],
) -> tuple[ModelFacts, ModelFacts | None]:
    """Read target and draft at the revisions that their engines will load.

    Args:
        draft_keys: ``speculative_config`` keys that may pin the draft's revision.

    Raises:
        BadInput: there is no such model.
    """
    trust = bool(engine_keys.get("trust_remote_code", False))
    target_facts = _read("--target", target, trust, engine_keys)
    if draft is None:
        return target_facts, None
    return target_facts, _read("--draft", draft, trust, draft_keys)


def _read(option: str, model: str, trust_remote_code: bool, pins: Mapping[str, Any]) -> ModelFacts:
    is_local = os.path.isabs(model) or model.startswith((".", "~")) or os.path.exists(model)
    if is_local and not os.path.isfile(os.path.join(model, "config.json")):
        raise BadInput(f"{option} {model}: not a folder with a config.json; name a model")
    from vllm.transformers_utils.config import get_config

    try:
        # Reading may run the model's code: at the revision that is measured.
        config = get_config(
            model,
            trust_remote_code=trust_remote_code,
            revision=pins.get("revision"),
            code_revision=pins.get("code_revision"),
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
        BadInput: vLLM refuses the engine arguments, or the dtype cannot be measured.
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


def kv_cache_bytes(settings: Settings, num_reqs: int, dtype: str, *models: ModelFacts) -> int:
    """Size the KV cache: as given, or for the longest requests, with a tenth to spare."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    per_token = sum(model.kv_bytes_per_token(dtype) for model in models)
    # A block of up to 128 tokens may be half empty at the end of each request.
    tokens = num_reqs * (settings.max_model_len + 128)
    return max(64 << 20, int(1.1 * tokens * per_token))
