"""Attention layers of the target, built as the worker builds them, without weights."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotBuilt(Exception):
    """The model's code needs weights to be built."""


@dataclass(frozen=True)
class Layers:
    """The target's attention layers, unsharded.

    Args:
        backend: vLLM's attention backend.
        all: by name.
        dense: why layers stay dense, by name; the others retrieve.
        weight_bytes: bytes of the whole target.
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

    from vllm_triforce.attention.platforms import platform_for
    from vllm_triforce.core.kv_groups import attention_layers

    ranks = vllm_config.parallel_config.tensor_parallel_size
    weight_bytes = _build(vllm_config)
    attention = platform_for(current_platform).retrieval()
    layers = attention_layers(vllm_config)
    dense = {
        name: _reason_of_dense(layer.impl)
        for name, layer in layers.items()
        if not attention.can_retrieve(layer)
    }
    backend = next(iter(layers.values())).get_attn_backend().get_name() if layers else "none"
    return Layers(backend, layers, dense, weight_bytes, ranks)


def weight_bytes_of_copy(name: str, vllm_config) -> int:
    """Build level 2's copy of the target from its checkpoint's configuration, and count its bytes.

    Raises:
        NotBuilt: the model's code needs weights.
    """
    from vllm_triforce.core.level2_model import copy_config

    return _build(copy_config(name, vllm_config))


def _build(vllm_config) -> int:
    """Build a model without weights on one rank; returns the bytes that they would have."""
    import torch
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
