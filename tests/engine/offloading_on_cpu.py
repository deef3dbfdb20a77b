"""Workers for vLLM's OffloadingConnector on the CPU, where vLLM has none.

The connector, its scheduler's part and the manager of its store are vLLM's own.
"""

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

_MANAGERS: dict = {}
_BLOCKS: dict[str, list[torch.Tensor]] = {}
"""Both by the name of a store in the connector's config, which engines share."""


class CopyingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` over a store that outlives the engine."""

    def get_manager(self):
        name = self.extra_config["store"]
        if name not in _MANAGERS:
            _MANAGERS[name] = super().get_manager()
        return _MANAGERS[name]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> "CopyingWorker":
        assert self.blocks_per_chunk == 1
        stored = _BLOCKS.setdefault(self.extra_config["store"], [])
        caches = [cache.tensor for cache in kv_caches.tensors]
        if not stored:
            stored += [cache.new_empty(self.num_chunks, *cache.shape[1:]) for cache in caches]
        assert [s.shape[1:] for s in stored] == [c.shape[1:] for c in caches]
        return CopyingWorker(caches, stored)


class CopyingWorker(OffloadingWorker):
    """Copies as late as the connector allows: when it is polled or waited for."""

    def __init__(self, caches: list[torch.Tensor], stored: list[torch.Tensor]) -> None:
        self._caches, self._stored = caches, stored
        self._pending: dict[int, tuple] = {}

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        self._pending[job_id] = self._caches, src_spec, self._stored, dst_spec
        return True

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        self._pending[job_id] = self._stored, src_spec, self._caches, dst_spec
        return True

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._pending.keys():
            sources, src_spec, targets, dst_spec = self._pending[job_id]
            for source, target in zip(sources, targets, strict=True):
                target[dst_spec.block_ids] = source[src_spec.block_ids]
            self._pending[job_id] = ()

    def get_finished(self) -> list[TransferResult]:
        self.wait({job_id for job_id, copy in self._pending.items() if copy})
        finished = [TransferResult(job_id, success=True) for job_id in self._pending]
        self._pending.clear()
        return finished
