"""Context and memory of a model, from its config; no weights are read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench.methods import DTYPE_BYTES, Variant
from vllm_triforce_bench.bench.settings import AUTO, GIB, Settings
from vllm_triforce_bench.options import BadInput


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


def read_all(settings: Settings) -> tuple[ModelFacts, ModelFacts | None]:
    """Read target and draft at the revisions that their engines will load.

    Raises:
        BadInput: there is no such model.
    """
    trust = bool(settings.engine_keys.get("trust_remote_code", False))
    target = _read("--target", settings.target, trust, settings.engine_keys)
    if settings.draft is None:
        return target, None
    return target, _read("--draft", settings.draft, trust, settings.draft_keys)


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


def served_dtypes(model: str, dtypes: Sequence[str], engine_keys: Mapping[str, Any]) -> list:
    """Replace ``auto`` by the dtype in which vLLM serves the model.

    Raises:
        BadInput: vLLM refuses the engine arguments, or the dtype cannot be measured.
    """
    if AUTO not in dtypes:
        return list(dtypes)
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(model=model, **engine_keys).create_model_config()
    except (TypeError, ValueError) as error:
        raise BadInput(f"--engine with --target {model}: {error}") from error
    served = str(config.dtype).removeprefix("torch.")
    if served not in DTYPE_BYTES:
        raise BadInput(
            f"--dtypes: vLLM serves {model} in {served}; use one of {tuple(DTYPE_BYTES)}"
        )
    return list(dict.fromkeys(served if dtype == AUTO else dtype for dtype in dtypes))


def kv_cache_bytes(settings: Settings, dtype: str, *models: ModelFacts) -> int:
    """Size the KV cache: as given, or for the longest requests, with a tenth to spare."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    per_token = DTYPE_BYTES[dtype] * sum(model.kv_values_per_token for model in models)
    # A block of up to 128 tokens may be half empty at the end of each request.
    tokens = max(settings.batch_sizes) * (settings.max_model_len + 128)
    return max(64 << 20, int(1.1 * tokens * per_token))


def engine_arguments(
    settings: Settings, dtype: str, variant: Variant, target: ModelFacts, draft: ModelFacts | None
) -> dict[str, Any]:
    """Make the arguments of an engine or server, without ``speculative_config``."""
    # TriForce keeps its draft's KV in a small cache outside vLLM's.
    shares_cache = draft is not None and variant.method == "draft_model"
    models = (target, draft) if shares_cache else (target,)
    return {
        "dtype": dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": max(settings.batch_sizes),
        "gpu_memory_utilization": 0.1,  # the KV cache's size is given
        "kv_cache_memory_bytes": kv_cache_bytes(settings, dtype, *models),
        **settings.engine_keys,
    }
