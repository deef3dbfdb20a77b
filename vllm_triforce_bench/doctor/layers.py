"""The target's layers, built as the worker builds them but without weights, and a rank's memory."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_triforce.config import read_config
from vllm_triforce.config.level2 import DTYPES, online_schemes
from vllm_triforce_bench.predict.steps import OTHER_BYTES


class NotBuilt(Exception):
    """The model's code needs weights to be built."""


@dataclass(frozen=True)
class Layers:
    """The target's attention layers, unsharded.

    Args:
        dense: why layers stay dense, by name; the others retrieve.
        ranks: ranks of tensor parallelism in the options.
    """

    backend: str
    all: dict[str, Any]
    dense: dict[str, str]
    weight_bytes: int
    ranks: int

    @property
    def retrieving(self) -> dict[str, Any]:
        return {name: layer for name, layer in self.all.items() if name not in self.dense}

    def to_dict(self) -> dict[str, Any]:
        retrieving = list(self.retrieving)
        return {"attention_backend": self.backend, "retrieve": retrieving, "dense": self.dense}


def layers_of(vllm_config) -> Layers:
    """Build the model and sort its attention layers; sets the configuration to one rank.

    Raises:
        NotBuilt: the model's code needs weights.
    """
    from vllm.platforms import current_platform

    from vllm_triforce.attention.platforms import attention_for
    from vllm_triforce.core.kv_groups import attention_layers

    ranks = vllm_config.parallel_config.tensor_parallel_size
    weight_bytes = _build(vllm_config)
    attention = attention_for(current_platform).retrieval
    layers = attention_layers(vllm_config)
    dense = {
        name: _reason_of_dense(layer.impl)
        for name, layer in layers.items()
        if not attention.can_retrieve(layer)
    }
    backend = next(iter(layers.values())).get_attn_backend().get_name() if layers else "none"
    return Layers(backend, layers, dense, weight_bytes, ranks)


def _build(vllm_config) -> int:
    """Build a model without weights on one rank; returns the bytes that they would have."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size = parallel.data_parallel_size = parallel.world_size = 1
    try:
        with (
            set_current_vllm_config(vllm_config),
            _single_rank(),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            torch.device("meta"),
        ):
            model = initialize_model(vllm_config)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    return sum(tensor.nbytes for tensor in model.parameters())


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """Provide the process groups that vLLM's layers look up."""
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _reason_of_dense(impl) -> str:
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple):
        window = window[0] + 1 if window[0] >= 0 else None
    if window is not None and window > 0:
        return f"sliding window of {window} tokens"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "ALiBi"
    if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
        return f"reads the KV cache of {impl.kv_sharing_target_layer_name}"
    if getattr(impl, "sinks", None) is not None:
        return "attention sinks"
    return f"{type(impl).__name__} is no attention that can be made sparse here"


def memory(vllm_config, layers: Layers, copy_bytes: int) -> dict[str, Any]:
    """Compute the bytes of one rank, with weights and heads divided evenly over ranks."""
    from vllm.platforms import current_platform

    from vllm_triforce.worker.memory import buffer_bytes, summary_bytes_per_kv_byte

    config, draft_model = read_config(vllm_config)
    retrieving = {name: _sharded(layer, layers.ranks) for name, layer in layers.retrieving.items()}
    fixed_bytes, share = 0, 0.0
    if not config.is_plain:
        drafts: dict[str, SimpleNamespace] = {}
        if draft_model:  # read off its configuration; the draft is not built
            model = vllm_config.speculative_config.draft_model_config
            parallel = vllm_config.speculative_config.draft_parallel_config
            layer = SimpleNamespace(
                num_kv_heads=model.get_num_kv_heads(parallel), head_size=model.get_head_size()
            )
            num_layers = model.get_num_layers(parallel)
            drafts = {f"draft.{index}": layer for index in range(num_layers)}
        fixed_bytes = sum(buffer_bytes(retrieving, drafts, config, vllm_config).values())
        share = summary_bytes_per_kv_byte(retrieving, config, vllm_config)
    each = kv_bytes_each(vllm_config)
    sharded = (_sharded(layer, layers.ranks) for layer in layers.all.values())
    kv_bytes = sum(2 * layer.num_kv_heads * layer.head_size * each for layer in sharded)
    results = {
        "ranks": layers.ranks,
        "weight_bytes": layers.weight_bytes // layers.ranks,
        "level2_model_bytes": copy_bytes // layers.ranks,
        "kv_bytes_per_token": kv_bytes,
        "triforce_bytes": fixed_bytes,
        "triforce_share_of_kv": share,
    }
    if config.kv_offload_gib is not None:
        results["host_bytes"] = int(config.kv_offload_gib * 2**30)
    if not current_platform.is_cpu():
        device_bytes = current_platform.get_device_total_memory()
        free_bytes = device_bytes * vllm_config.cache_config.gpu_memory_utilization
        free_bytes -= results["weight_bytes"] + results["level2_model_bytes"]
        free_bytes -= OTHER_BYTES + fixed_bytes
        results["device_bytes"] = device_bytes
        results["device_kv_tokens"] = max(0, int(free_bytes / (kv_bytes * (1 + share))))
    return results


def level2_model_bytes(name: str | None, vllm_config, layers: Layers) -> int:
    """Compute the bytes of level 2's copy of the whole target; 0 without one.

    Raises:
        NotBuilt: the copy is another checkpoint, and its code needs weights.
    """
    config = vllm_config.model_config
    if name is None:
        return 0
    if name in DTYPES:
        return layers.weight_bytes // config.dtype.itemsize * getattr(torch, name).itemsize
    if name in online_schemes(config):  # which leave the embedding and the output head
        text = config.hf_text_config
        num_ends = 1 if getattr(text, "tie_word_embeddings", False) else 2
        kept = num_ends * config.get_vocab_size() * text.hidden_size * config.dtype.itemsize
        bits = 4 if name.endswith("4") else 8
        return kept + (layers.weight_bytes - kept) * bits // (8 * config.dtype.itemsize)
    from vllm_triforce.core.models import copy_config

    # Another checkpoint, built from its configuration.
    return _build(copy_config(name, vllm_config))


def _sharded(layer, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_heads=max(1, layer.num_heads // ranks),
        num_kv_heads=max(1, layer.num_kv_heads // ranks),
        head_size=layer.head_size,
    )


def kv_bytes_each(vllm_config) -> int:
    is_fp8 = "fp8" in vllm_config.cache_config.cache_dtype
    return 1 if is_fp8 else vllm_config.model_config.dtype.itemsize
