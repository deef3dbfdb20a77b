"""TriForce on vLLM's GPU worker."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_triforce.worker.mixin import TriForceWorkerMixin


class TriForceGPUWorker(TriForceWorkerMixin, Worker):
    pass
