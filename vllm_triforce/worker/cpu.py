"""TriForce on vLLM's CPU worker."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_triforce.vllm_patches.expand_kernel import fix_expand_kernel
from vllm_triforce.worker.base import TriForceWorkerMixin


class TriForceCPUWorker(TriForceWorkerMixin, CPUWorker):
    """Over vLLM's CPU worker."""

    def init_device(self) -> None:
        if not self.use_v2_model_runner:
            fix_expand_kernel()
        super().init_device()
