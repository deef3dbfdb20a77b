"""Choose which CUDA graphs of the target's decode passes vLLM captures.

With speculation, Runner V2 captures full decode graphs only for batches in which every request
verifies ``num_speculative_tokens`` drafts. With TriForce, requests also decode one token at a time,
and proposals differ in length. Both need graphs, or a step takes longer than stock vLLM's.
"""

from vllm.config.compilation import CUDAGraphMode
from vllm.utils.math_utils import next_power_of_2, round_up
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_triforce.vllm_patches import swaps

# Tokens of passes that verify drafts. Up to _MAX_WEIGHT_BOUND_TOKENS a pass takes as long as
# reading the weights, so sizes double; above, they are _SIZE_STEP apart.
_MIN_TOKENS, _MAX_WEIGHT_BOUND_TOKENS, _SIZE_STEP = 16, 128, 64


def serve_any_mix(manager: CudaGraphManager) -> None:
    """Make the manager capture decode graphs for any mix of 1 to ``decode_query_len`` tokens.

    They replace the graphs for batches in which all requests have the same number of tokens, as in
    vLLM where it truncates proposals on the device. The attention backend must support it
    (``get_varlen_cudagraph_unsupported_backend`` in vllm/v1/worker/gpu/attn_utils.py).
    """
    swaps.VARLEN_DECODE.set(manager, True)
    manager._candidates.clear()
    manager._capture_descs.clear()
    manager._init_candidates()


def thin_decode_graphs(manager: CudaGraphManager) -> None:
    """Keep only coarse sizes of the graphs that verify drafts.

    Graphs for plain decoding already equal stock vLLM's in number. Without thinning, the number
    would double.
    """
    captured = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    # The last entry wins: of the sizes that share a coarse size, the largest.
    kept = {
        (desc.num_active_loras, _coarse_size(desc.num_tokens)): desc
        for desc in sorted(captured, key=lambda desc: desc.num_tokens)
    }
    manager._capture_descs[CUDAGraphMode.FULL] = [d for d in captured if d in kept.values()]
    for (num_tokens, active_loras), candidates in manager._candidates.items():
        others = [desc for desc in candidates if desc not in captured]
        if len(others) < len(candidates):
            replacement = next(
                desc
                for desc in kept.values()
                if desc.num_tokens >= num_tokens and desc.num_active_loras == active_loras
            )
            candidates[:] = [replacement, *others]


def _coarse_size(num_tokens: int) -> int:
    if num_tokens <= _MAX_WEIGHT_BOUND_TOKENS:
        return max(_MIN_TOKENS, next_power_of_2(num_tokens))
    return round_up(num_tokens, _SIZE_STEP)


def add_plain_decode_graphs(manager: CudaGraphManager, max_query_len: int | None = None) -> None:
    """Add graphs of one token a request to those that the manager captures and dispatches.

    vLLM does the same where the number of draft tokens depends on the batch size
    (``CudaGraphManager._init_candidates``). Their metadata is that of ``max_query_len`` tokens.
    """
    captured = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    sizes = manager.compilation_config.cudagraph_capture_sizes or ()
    added, min_tokens = [], 0
    for size in sorted(size for size in sizes if size <= manager.max_num_reqs):
        for active_loras in manager.lora_capture_cases:
            desc = BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=size,
                uniform_token_count=1,
                max_query_len=max_query_len,
                num_active_loras=active_loras,
            )
            added.append(desc)
            for num_tokens in range(min_tokens, size + 1):
                candidates = manager._candidates.setdefault((num_tokens, active_loras), [])
                # First, as graphs for any mix match too. Only single tokens match this one.
                candidates.insert(0, desc)
        min_tokens = size + 1
    # In descending order: smaller graphs share the memory of the largest activations and output.
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(
        [*captured, *added], key=lambda desc: desc.num_tokens, reverse=True
    )


def choose_decode_graphs(runner) -> None:
    """Change which graphs the runner's new manager captures.

    vLLM creates a manager twice, the first time to measure the memory of its graphs. Call this
    both times.
    """
    manager = runner.cudagraph_manager
    mode = CUDAGraphMode.NONE if manager is None else manager.cudagraph_mode
    if not mode.separate_routine() or mode.decode_mode() != CUDAGraphMode.FULL:
        return
    unsupported = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups,  # of the target; the draft's layers are in none
        runner.vllm_config,
        manager.decode_query_len,
    )
    if unsupported is None:
        serve_any_mix(manager)
    thin_decode_graphs(manager)
    # State space captures no other length.
    builders = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
    is_bound = any(isinstance(its, BaseMambaAttentionMetadataBuilder) for its in builders)
    add_plain_decode_graphs(manager, manager.decode_query_len if is_bound else None)
