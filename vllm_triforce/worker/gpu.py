"""TriForce's part of a vLLM worker, for every platform."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from vllm_triforce.attention.platforms import attention_for
from vllm_triforce.config import ResolvedConfig, read_config
from vllm_triforce.config.budget import fit_blocks
from vllm_triforce.core.kv_groups import recurrent_layers
from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.carrier import CounterSender
from vllm_triforce.worker.memory import (
    buffer_bytes,
    kv_cache_budget,
    logits_in_flight,
    summary_bytes_per_kv_byte,
)

if TYPE_CHECKING:
    from vllm_triforce.offload.cache import OffloadedCache

logger = init_logger("vllm.triforce")


class TriForceGPUWorker(Worker):
    """vLLM's GPU worker, the base of its other workers, with TriForce.

    vLLM builds its runner in ``init_device()``.
    """

    triforce: Any
    """Adapter of the runner that vLLM chose: ``runner_v1/runner.py`` or ``runner_v2/runner.py``."""
    _counter_sender: CounterSender | None = None
    offload: "OffloadedCache | None" = None
    """Set if some layers' KV cache lies in host memory."""

    @cached_property
    def triforce_config(self) -> ResolvedConfig:
        return read_config(self.vllm_config)[0]

    def init_device(self) -> None:
        super().init_device()
        config = self.triforce_config
        if config.kv_offload_gib is not None:
            from vllm_triforce.offload.startup import check_chosen_backend

            check_chosen_backend(self.vllm_config)
        runner = self.model_runner
        arguments = (self.vllm_config, self.device, runner, *read_config(self.vllm_config))
        if not self.use_v2_model_runner:
            from vllm_triforce.runner_v1.runner import RunnerAdapterV1

            self.triforce = RunnerAdapterV1(*arguments)
            swaps.DRAFTER.set(runner, self.triforce)
        else:
            from vllm_triforce.runner_v2.runner import RunnerAdapterV2

            self.triforce = RunnerAdapterV2(*arguments)
            swaps.SPECULATOR.set(runner, self.triforce)

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        if self.use_v2_model_runner:
            from vllm_triforce.runner_v2.rejection import bound_grammar_masks

            bound_grammar_masks(self.model_runner, self.triforce_config)

    def reload_weights(self, *args, **kwargs) -> None:
        super().reload_weights(*args, **kwargs)
        self._warn_of_stale_copy()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        if not self._weight_update_is_draft:
            self._warn_of_stale_copy()

    def _warn_of_stale_copy(self) -> None:
        if (name := self.triforce_config.level2_model) is not None:
            logger.warning(
                "level2_model=%s keeps the weights from before. Outputs are right, but fewer "
                "tokens of level 2 are accepted; start the engine again to load it anew.",
                name,
            )

    def extra_memory(self) -> tuple[dict[str, int], float]:
        """Return TriForce's bytes by purpose, and its further bytes per byte of KV cache."""
        config = self.triforce_config
        if config.is_plain:
            return {}, 0.0
        target_layers = self.triforce.target_layers
        retrieval = attention_for(current_platform).retrieval
        # vLLM's blocks have their size now, and did not when the engine was configured.
        config = fit_blocks(config, retrieval.chunk_size(self.vllm_config.cache_config.block_size))
        can_retrieve = retrieval.can_retrieve
        layers = {name: layer for name, layer in target_layers.items() if can_retrieve(layer)}
        layers = layers or target_layers  # without any, allocate() says why
        return (
            buffer_bytes(
                layers,
                self.triforce.draft_layers,
                config,
                self.vllm_config,
                recurrent_layers(self.vllm_config),
            ),
            summary_bytes_per_kv_byte(layers, config, self.vllm_config),
        )

    def plan_offload(self, device_bytes: int, summary_share: float) -> int:
        """Place the KV cache and return its bytes on the device and in host memory together."""
        from vllm_triforce.offload.startup import plan_offload

        config, specs = self.triforce_config, self.get_kv_cache_spec()
        self.offload = plan_offload(specs, config, self.vllm_config, device_bytes, summary_share)
        return self.offload.placement.kv_bytes

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

    def initialize_from_config(self, kv_cache_config) -> None:
        if self.offload is None:
            super().initialize_from_config(kv_cache_config)
        else:
            from vllm.v1.worker.gpu import attn_utils

            from vllm_triforce.offload.startup import report_offload

            with swaps.ALLOCATE_KV_CACHE.during(attn_utils, self.offload.allocate):
                super().initialize_from_config(kv_cache_config)
            max_len = self.vllm_config.model_config.max_model_len
            report_offload(self.offload, kv_cache_config, max_len)
        # The runner's copy has the layers that read another layer's KV cache as well.
        self.triforce.allocate(self.model_runner.kv_cache_config, self.offload)

    def compile_or_warm_up_model(self):
        # Before vLLM resets the seed, which it does last.
        self.triforce.calibrate()
        return super().compile_or_warm_up_model()

    def _maybe_activate_jit_monitor(self) -> None:
        # From here on a compilation ends an engine with jit_monitor_mode="error".
        self.warm_up_triforce()
        super()._maybe_activate_jit_monitor()

    def warm_up_triforce(self) -> None:
        """Warm TriForce up after vLLM's own warm-up, and send counters from then on."""
        self.triforce.warm_up()
        # Warm-up requests are not counted, and counters that fell would end the front end.
        self._counter_sender = CounterSender(self.triforce.sent_counters)

    def execute_model(self, scheduler_output, *args, **kwargs):
        self.triforce.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return output if output is None else self._with_counters(output)

    def sample_tokens(self, *args, **kwargs):
        output = super().sample_tokens(*args, **kwargs)
        return self._with_counters(self.triforce.end_step(output))

    def _with_counters(self, output):
        return output if self._counter_sender is None else self._counter_sender.attach(output)

    def triforce_held_requests(self) -> dict[str, int]:
        """Count the requests with state, by the part that keeps it, to find leaks."""
        return self.triforce.held_requests()

    def triforce_counters(self) -> dict:
        """Return the per-level counters since start-up (``metrics/report.py``, ``counters_of``)."""
        return self.triforce.counters.to_dict()

    def triforce_measured(self, remeasure: bool = False) -> dict | None:
        """Return the seconds that passes take (``controller/measurements.py``).

        They are measured at start-up; None if nothing is chosen by them.

        Args:
            remeasure: measure now in any case. This writes to the KV cache, so the engine must
                have no requests and no prefix caching.
        """
        measured = self.triforce.measured_passes(remeasure)
        return None if measured is None else measured.to_dict()

    def triforce_synchronize_times(self, synchronize: bool) -> None:
        """Set whether each timed part waits for the device, for benchmarks.

        Without it the times are those of launching.
        """
        self.triforce.synchronize_times(synchronize)
