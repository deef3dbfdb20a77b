"""TriForce on vLLM's CPU worker."""

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel
from vllm_triforce.worker.gpu import TriForceGPUWorker


class TriForceCPUWorker(TriForceGPUWorker, CPUWorker):
    """vLLM's CPU worker with TriForce."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            super().init_device()
            return
        fix_expand_kernel()
        with swaps.MROPE_CHECK.during(SpecDecodeBaseProposer, lambda drafter: None):
            super().init_device()

    def compile_or_warm_up_model(self):
        seconds = super().compile_or_warm_up_model()
        self.warm_up_triforce()
        return seconds

    def determine_available_memory(self) -> int:
        available = CPUWorker.determine_available_memory(self)
        if self.triforce_config.kv_offload_gib is None:
            return available
        fixed, share = self.extra_memory()
        return self.plan_offload(available - sum(fixed.values()), share)
