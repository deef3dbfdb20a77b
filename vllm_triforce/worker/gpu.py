"""TriForce on vLLM's GPU worker."""

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_triforce.worker.base import TriForceWorkerMixin
from vllm_triforce.worker.memory import kv_cache_budget, logits_in_flight

logger = init_logger("vllm.triforce")


class TriForceGPUWorker(TriForceWorkerMixin, Worker):
    """vLLM's GPU worker with TriForce. It reserves memory for TriForce's buffers."""

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        parts, share = self.extra_memory()
        if parts:
            parts |= self._unprofiled_bytes()
        fixed = sum(parts.values())
        if self.triforce_config.kv_offload_gib is not None:
            return self.plan_offload(available - fixed, share)
        kv_bytes = kv_cache_budget(available, fixed, share, self.triforce_config)
        parts |= {"chunk summaries": int(kv_bytes * share)}
        logger.info_once(
            "TriForce leaves %.2f of %.2f GiB to the KV cache. The rest in GiB: %s.",
            kv_bytes / 2**30,
            available / 2**30,
            ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if size),
        )
        return kv_bytes

    def _maybe_activate_jit_monitor(self) -> None:
        # From here on a compilation ends an engine with jit_monitor_mode="error".
        self.warm_up_triforce()
        super()._maybe_activate_jit_monitor()

    def _unprofiled_bytes(self) -> dict[str, int]:
        """Return bytes that vLLM's memory profile does not cover, by purpose."""
        # A proposal runs after the full pass has freed its activations, which vLLM has profiled.
        has_estimate = envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
        activations = getattr(self, "peak_activation_memory", 0)
        activations -= getattr(self, "cudagraph_memory_estimate", 0) * has_estimate
        logits = logits_in_flight(self.triforce_config, self.vllm_config)
        return {
            "CUDA graphs": self.triforce.graph_bytes * has_estimate,
            "logits in flight": max(0, logits - activations),
        }
