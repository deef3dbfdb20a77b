"""Configurations of the models, and the memory of an engine by them; no weights are read."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_triforce_bench.bench.methods import DTYPE_BYTES, Variant
from vllm_triforce_bench.bench.settings import AUTO, GIB, Settings
from vllm_triforce_bench.options import BadInput

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def read_all(settings: Settings) -> "tuple[ModelConfig, ModelConfig | None]":
    """Read target and draft at the revisions that their engines will load.

    Raises:
        BadInput: there is no such model, or vLLM refuses the engine arguments.
    """
    keys = settings.engine_keys
    target = _read("--target", settings.target, keys)
    if settings.draft is None:
        return target, None
    pins = ("revision", "code_revision")
    own = {name: settings.draft_keys[name] for name in pins if name in settings.draft_keys}
    own["trust_remote_code"] = bool(keys.get("trust_remote_code", False))
    return target, _read("--draft", settings.draft, own | {"runner": "draft"})


def _read(option: str, model: str, keys: Mapping[str, Any]) -> "ModelConfig":
    is_local = os.path.isabs(model) or model.startswith((".", "~")) or os.path.exists(model)
    if is_local and not os.path.isfile(os.path.join(model, "config.json")):
        raise BadInput(f"{option} {model}: not a folder with a config.json; name a model")
    from vllm.engine.arg_utils import EngineArgs

    try:
        # Reading may run the model's code: at the revision that is measured.
        return EngineArgs(model=model, **keys).create_model_config()
    except TypeError as error:
        raise BadInput(f"--engine with {option} {model}: {error}") from error
    except Exception as error:
        raise BadInput(f"{option} {model}: cannot be read ({error})") from error


def served_dtypes(target: "ModelConfig", dtypes: Sequence[str]) -> list:
    """Replace ``auto`` by the dtype in which vLLM serves the model.

    Raises:
        BadInput: the dtype cannot be measured.
    """
    served = str(target.dtype).removeprefix("torch.")
    if AUTO in dtypes and served not in DTYPE_BYTES:
        raise BadInput(
            f"--dtypes: vLLM serves {target.model} in {served}; use one of {tuple(DTYPE_BYTES)}"
        )
    return list(dict.fromkeys(served if dtype == AUTO else dtype for dtype in dtypes))


def weight_bytes(model: "ModelConfig") -> int:
    """Return the bytes of the weight files; 0 without a local folder."""
    return sum(file.stat().st_size for file in Path(model.model).glob("*.safetensors"))


def kv_cache_bytes(settings: Settings, dtype: str, *models: "ModelConfig") -> int:
    """Size the KV cache: as given, or for the longest requests, with a tenth to spare."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    values_per_token = 0
    for sizes in (model.model_arch_config for model in models):
        heads = sizes.total_num_hidden_layers * sizes.total_num_kv_heads
        values_per_token += 2 * heads * sizes.head_size
    # A block of up to 128 tokens may be half empty at the end of each request.
    tokens = max(settings.batch_sizes) * (settings.max_model_len + 128)
    return max(64 << 20, int(1.1 * tokens * DTYPE_BYTES[dtype] * values_per_token))


def engine_arguments(
    settings: Settings,
    dtype: str,
    variant: Variant,
    target: "ModelConfig",
    draft: "ModelConfig | None",
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
