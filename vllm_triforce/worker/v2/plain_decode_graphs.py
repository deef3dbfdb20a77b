"""CUDA graphs for batches in which nothing is speculated on.

With speculation configured, Runner V2 captures whole decode passes for
``num_speculative_tokens + 1`` tokens a request only. Requests below ``min_context`` decode one
token at a time, as without TriForce, and must find the graphs that they would have without it.
"""

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager


def add_plain_decode_graphs(manager: CudaGraphManager) -> int:
    """Lets the manager capture, and choose, graphs of one token a request as well.

    vLLM does the same where the number of draft tokens depends on the batch size
    (``CudaGraphManager._init_candidates``).

    Returns:
        the number of graphs added.
    """
    mode = manager.cudagraph_mode
    if manager.decode_query_len == 1 or manager.varlen_decode or not mode.separate_routine():
        return 0
    if mode.decode_mode() != CUDAGraphMode.FULL:
        return 0
    captured = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    known = {(desc.num_tokens, desc.uniform_token_count) for desc in captured}
    sizes = sorted(manager.compilation_config.cudagraph_capture_sizes or ())
    added, smallest = [], 0
    for size in sizes:
        if size > manager.max_num_reqs or (size, 1) in known:
            continue
        for active_loras in manager.lora_capture_cases:
            desc = BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=size,
                uniform_token_count=1,
                num_active_loras=active_loras,
            )
            added.append(desc)
            for num_tokens in range(smallest, size + 1):
                candidates = manager._candidates.setdefault((num_tokens, active_loras), [])
                # Before what serves any batch; only a batch of single tokens matches.
                candidates.insert(0, desc)
        smallest = size + 1
    descs = [*captured, *added]
    # The largest first: its activations and its output hold those of the others.
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(
        descs, key=lambda desc: desc.num_tokens, reverse=True
    )
    return len(added)
