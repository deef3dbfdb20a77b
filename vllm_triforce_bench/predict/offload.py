"""The time of a step where the last layers' KV lies in host memory (docs/offload.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_triforce.config import ResolvedConfig, TriForceConfig
from vllm_triforce.offload.placement import Placement, place_layers
from vllm_triforce_bench.predict.passes import Pass
from vllm_triforce_bench.predict.steps import Predictor

_GIB = 2**30


class DoesNotFit(ValueError):
    """Nor with KV in host memory: the device has no room for what must be there."""


def offload_config(
    kv_offload_gib: float, max_num_seqs: int, longest_proposal: int, budget: int, block: int = 16
) -> ResolvedConfig:
    """The defaults of TriForce with a draft, all requests being speculated on.

    Args:
        longest_proposal, budget: tokens.
        block: tokens of vLLM's KV block.
    """
    asked = TriForceConfig(
        num_speculative_tokens=longest_proposal,
        retrieval_budget=budget,
        max_speculating_seqs=max_num_seqs,
        kv_offload_gib=kv_offload_gib,
    )
    return asked.with_defaults(can_adapt=True, model="a draft", has_fixed_shapes=True).resolve(
        block
    )


@dataclass(kw_only=True)
class OffloadedPredictor(Predictor):
    """Of an engine with ``kv_offload_gib``. A full pass reads the context's blocks of each layer in
    host memory before the layer's attention, not beside it; level 2 reads its pool on the device.

    Args:
        config: the engine's; its block is the chunk.
        max_num_seqs: requests at a time.
        max_model_len: tokens of the longest.
        speculates: whether level 2's pool and chunk summaries lie on the device too.

    Raises:
        ValueError: the machine's ``host_bandwidth`` is unknown.
        DoesNotFit: the device has no room for the staging layer, the pool and the chunk summaries.
    """

    config: ResolvedConfig
    max_num_seqs: int
    max_model_len: int
    speculates: bool = True
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        if self.machine.host_bandwidth is None:
            raise ValueError(
                f"machine {self.machine.name!r} has no host_bandwidth, so that nothing says how "
                "fast KV is read from host memory; give a JSON file of the machine with it, in "
                "bytes a second, to --machines"
            )
        self.chunk = self.config.block_size
        self.refresh_interval = self.config.refresh_interval
        try:
            self.placement = self._placed()
        except ValueError as error:
            raise DoesNotFit(str(error)) from error
        if (fits := self.placement.num_blocks) < self._needed_blocks(0):
            raise DoesNotFit(
                f"kv_offload_gib={self.config.kv_offload_gib:g}: {fits * self.chunk} tokens fit, "
                f"fewer than {self.max_num_seqs} x {self.max_model_len}"
            )

    @property
    def device_bytes(self) -> int:
        """Left for KV and what offloading keeps beside it."""
        draft = self.draft.weight_bytes if self.draft else 0
        return int(self.room_bytes - self.model.weight_bytes - draft)

    @property
    def page_bytes(self) -> int:
        """Of a block in one layer."""
        return self.chunk * self.model.kv_bytes_per_token // self.model.layers

    @property
    def summary_share(self) -> float:
        """Bytes of chunk summaries for each byte of KV: a key of each block's keys and values."""
        return 0.5 / self.chunk if self.speculates else 0.0

    def without_speculation(self) -> "OffloadedPredictor":
        """An engine that has nothing but KV on the device, and so more layers of it."""
        return replace(self, draft=None, speculates=False)

    def _placed(self) -> Placement:
        config = self.config
        assert config.kv_offload_gib is not None
        seqs = min(self.max_num_seqs, config.max_speculating_seqs)
        reach = config.num_speculative_tokens + config.gamma
        return place_layers(
            num_layers=self.model.layers,
            page_bytes=self.page_bytes,
            host_bytes=int(config.kv_offload_gib * _GIB),
            device_bytes=self.device_bytes,
            pool_bytes=seqs * config.table_width * self.page_bytes if self.speculates else 0,
            summary_share=self.summary_share,
            max_blocks=self._needed_blocks(reach) + 1,  # one block is nobody's
        )

    def _needed_blocks(self, reach: int) -> int:
        """
        Args:
            reach: tokens behind the last of ``max_model_len``.
        """
        return self.max_num_seqs * -(-(self.max_model_len + reach) // self.chunk)

    # What crosses from host memory to the device, in bytes and seconds.

    def full_pass_bytes(self, contexts: Sequence[int]) -> int:
        """All blocks of the layers in host memory."""
        blocks = sum(-(-context // self.chunk) for context in contexts)
        return blocks * self.page_bytes * self.placement.num_host_layers

    def refresh_bytes(self, batch: int) -> int:
        """Of a selection, at worst: nothing that is selected anew is in the pool already."""
        pages = batch * self.config.budget_blocks
        return pages * self.page_bytes * self.placement.num_host_layers

    def tail_bytes(self, batch: int) -> int:
        """Of what a full pass has written, at worst: blocks that as many tokens as it takes can
        touch."""
        touched = (self.config.num_speculative_tokens - 1) // self.chunk + 2
        return batch * touched * self.page_bytes * self.placement.num_host_layers

    def crossing(self, num_bytes: float) -> float:
        """Seconds."""
        assert self.machine.host_bandwidth is not None
        return num_bytes / self.machine.host_bandwidth

    # Passes and proposals.

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> Pass:
        return self._staged(super().full_pass(tokens, contexts), contexts)

    def uniform_full_pass(self, batch: int, tokens: int, context: int) -> Pass:
        its = super().uniform_full_pass(batch, tokens, context)
        return self._staged(its, [context] * batch)

    def selection_seconds(self, batch: int, context: int) -> float:
        """A step's share, with what is brought to the pool."""
        brought = self.refresh_bytes(batch) / self.refresh_interval + self.tail_bytes(batch)
        launched = self._launched(self.counts.refill_kernels)
        return super().selection_seconds(batch, context) + self.crossing(brought) + launched

    def _staged(self, its: Pass, contexts: Sequence[int]) -> Pass:
        crossing = self.crossing(self.full_pass_bytes(contexts))
        kernels = self.placement.num_host_layers * self.counts.staging_kernels
        seconds = its.seconds + crossing + kernels * self.machine.kernel_seconds
        return Pass(seconds, max(its.limit_seconds, crossing))
