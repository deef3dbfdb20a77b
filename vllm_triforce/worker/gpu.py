"""TriForce on vLLM's GPU worker."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_triforce.worker.base import TriForceWorkerMixin, read_config
from vllm_triforce.worker.memory import room_for_kv_cache
from vllm_triforce.worker.v2.decode_graphs import (
    add_plain_decode_graphs,
    record_nothing_in_plain_graphs,
    serve_any_mix,
)

logger = init_logger("vllm.triforce")


class TriForceGPUWorker(TriForceWorkerMixin, Worker):
    """Over vLLM's GPU worker, which leaves room for what lies beside the KV cache."""

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        config, _ = read_config(self.vllm_config)
        fixed, share = self.beside_kv_cache()
        if config.kv_offload_gib is not None:
            return self.plan_offload(available - fixed, share)
        left = room_for_kv_cache(available, fixed, share, config)
        logger.info_once(
            "TriForce leaves %.2f of %.2f GiB to the KV cache; chunk summaries, selections, the "
            "draft's windows and logits need the rest.",
            left / 2**30,
            available / 2**30,
        )
        return left

    def initialize_from_config(self, kv_cache_config) -> None:
        super().initialize_from_config(kv_cache_config)
        runner: Any = self.model_runner  # of V2: config/checks.py refuses V1 on a GPU
        manager = runner.cudagraph_manager
        if manager is None:
            return
        unsupported = get_varlen_cudagraph_unsupported_backend(
            runner.attn_groups,
            self.vllm_config,
            manager.decode_query_len,
            checked_layer_names=set(self.triforce.target_layers),
        )
        if unsupported is None:
            serve_any_mix(manager)
        config, _ = read_config(self.vllm_config)
        if add_plain_decode_graphs(manager) and not config.is_plain:
            record_nothing_in_plain_graphs(runner, self.triforce.recorder)
