"""Builds Runner V1's speculator from the loaded models and vLLM's KV cache."""

import sys
from typing import Any

from vllm.platforms import current_platform

from vllm_triforce.attention.base import RaggedRetrievalAttention
from vllm_triforce.attention.platforms import platform_for
from vllm_triforce.attention.query_recorder import QueryRecorder
from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.cache.summaries import ChunkSummaries
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.budget import fit_blocks
from vllm_triforce.config.draft_sources import SOURCES
from vllm_triforce.controller import Controller
from vllm_triforce.core.kv_groups import KVGroup, group_layers, retrieval_block_size
from vllm_triforce.core.level2_model import Level2Model
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.runner_v1.levels import Level1
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.retrieval import NoLevel2, RetrievalLevel
from vllm_triforce.runner_v1.sources.source import SourceParts
from vllm_triforce.runner_v1.speculator import SpeculatorV1
from vllm_triforce.selection import POLICIES


class SpeculatorPartsV1:
    """The speculator, and the parts that the runner's adapter needs.

    Args:
        parts: configuration, device and draft.
        level2_model: the target, or its copy.
        target_layers: its attention layers by name.
        attn_groups: vLLM's attention groups per KV cache group, with their metadata builders.
        block_sizes: tokens per block of each KV cache group.
    """

    def __init__(
        self,
        parts: SourceParts,
        level2_model: Level2Model,
        target_layers: dict,
        kv_cache_config,
        attn_groups,
        block_sizes: list[int],
    ) -> None:
        vllm_config, config, device = parts.vllm_config, parts.config, parts.device
        self.counters = LevelCounters()
        groups, layers, builder = [], [], None
        if config.uses_level2:
            groups, layers, builder = group_layers(
                kv_cache_config, attn_groups, block_sizes, target_layers, ragged_attention()
            )
            config = fit_blocks(config, retrieval_block_size(groups))
        # Passes of level 2 that select by their own queries need none of the full passes.
        min_context = config.min_context if config.keeps_selections else sys.maxsize
        self.recorder = QueryRecorder(len(layers), config.num_speculative_tokens + 1, min_context)
        level2: RetrievalLevel | NoLevel2 = NoLevel2()
        if config.uses_level2:
            level2 = self._level2(parts, config, level2_model, groups, layers, builder)
        sources = [SOURCES[name].build(parts) for name in config.sources]
        controller = Controller(config, [source.traits() for source in sources])
        self.speculator = SpeculatorV1(
            Level1(sources, controller, vllm_config.model_config.get_vocab_size()),
            level2,
            controller,
            InnerNoise(
                vllm_config.model_config.seed,
                device,
                replica=vllm_config.parallel_config.data_parallel_index,
            ),
            self.counters,
        )

    def _level2(
        self,
        parts: SourceParts,
        config: ResolvedConfig,
        level2_model: Level2Model,
        groups: list[KVGroup],
        layers: list,
        builder: Any,
    ) -> RetrievalLevel:
        """Build level 2 over the target's KV cache.

        Args:
            config: ``parts.config``, fitted to the KV blocks of the layers that retrieve.
            layers: attention layers that retrieve; ``builder`` builds their metadata.
        """
        attention = ragged_attention()(layers, builder, self.recorder)
        policy = POLICIES[config.policy]()
        summaries = allocate_summaries(
            policy,
            layers,
            parts.vllm_config.model_config.dtype,
            parts.device,
            attention.block_summaries(),
        )
        cache = RetrievalCache(
            summaries,
            policy,
            block_size=config.block_size,
            budget=config.budget,
            refresh_interval=config.refresh_interval,
            head_strides=attention.head_strides(),
        )
        return RetrievalLevel(level2_model, groups, attention, cache, parts.device)


def ragged_attention() -> type[RaggedRetrievalAttention]:
    """Return level 2's attention class of the platform.

    Raises:
        ValueError: the platform supports passes of fixed shapes only.
    """
    backend = platform_for(current_platform)
    retrieval = backend.retrieval()
    if not issubclass(retrieval, RaggedRetrievalAttention):
        raise ValueError(
            f"use_v2_model_runner=False: attention backend {backend.name!r} has passes of fixed "
            "shapes, for Model Runner V2 only; unset VLLM_USE_V2_MODEL_RUNNER"
        )
    return retrieval


def allocate_summaries(policy, layers: list, dtype, device, block_summaries) -> ChunkSummaries:
    """Allocate the summaries that the policy needs."""
    first = layers[0]
    num_blocks = first.kv_cache.shape[0]
    num_keys = len(policy.summaries) * len(layers) * first.num_kv_heads * num_blocks
    with checked_allocation(
        f"level 2's summaries of {num_blocks} blocks",
        num_keys * first.head_size * dtype.itemsize,
        device,
        "make the KV cache smaller (--kv-cache-memory-bytes, --gpu-memory-utilization, or "
        "VLLM_CPU_KVCACHE_SPACE on the CPU)",
    ):
        return ChunkSummaries(
            policy.summaries,
            num_layers=len(layers),
            num_blocks=num_blocks,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            dtype=dtype,
            device=device,
            block_summaries=block_summaries,
        )
