"""Plain decoding over a KV cache in host memory, on Model Runner V2 (``levels="3"``)."""

import torch
from vllm.platforms import current_platform

from vllm_triforce.attention.backends import backend_for
from vllm_triforce.attention.query_recorder import DeafRecorder
from vllm_triforce.core.kv_groups import group_layers
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.metrics.device_counters import DeviceCounters
from vllm_triforce.worker.v2.speculator import SpeculatorV2


class PlainSpeculatorV2(SpeculatorV2):
    """Proposes nothing, ever: it has layers in host memory staged, and keeps nothing beside."""

    def capture(self) -> None:
        """Nothing."""

    def allocate(self, kv_cache_config, offload) -> None:
        """Tells layers in host memory, once the KV cache exists."""
        self._counts = DeviceCounters(self.device)
        backend = backend_for(current_platform).retrieval()
        _, layers, builder = group_layers(
            kv_cache_config,
            self._runner.attn_groups,
            self._runner.block_tables.block_sizes,
            self.target_layers,
            backend,
            self.config,
        )
        offload.check_attached([layer.layer_name for layer in layers])
        backend(
            layers,
            builder,
            DeafRecorder(),
            offload.for_attention({}, self._counts.sums, self.device),
        )

    @property
    def counters(self) -> LevelCounters:
        return self._counts.read()

    @property
    def sent_counters(self) -> LevelCounters:
        return self._counts.known

    def measured_passes(self, anew: bool) -> None:
        """Nothing is chosen."""

    def held_requests(self) -> dict[str, int]:
        return {}

    def synchronize_times(self, synchronize: bool) -> None:
        """No part is timed."""

    @torch.inference_mode()
    def propose(
        self, input_batch, *args, dummy_run: bool = False, **kwargs
    ) -> torch.Tensor:  # [num_reqs, num_speculative_tokens], int64
        if not dummy_run:
            self._counts.note()
        return self.propose_nothing(input_batch.num_reqs)
