"""CUDA graphs for the batches that there are with TriForce.

With speculation configured, Runner V2 captures whole decode passes for batches in which everybody
verifies ``num_speculative_tokens`` tokens. Requests on which nothing is speculated decode one token
at a time, as without TriForce, and proposals are as long as was planned: both must find graphs as
well, or a step takes longer than stock vLLM's.
"""

from collections.abc import Iterable

from vllm.config.compilation import CUDAGraphMode
from vllm.utils.math_utils import next_power_of_2, round_up
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from vllm_triforce.attention.query_recorder import StaticQueryRecorder
from vllm_triforce.vllm_patches import swaps

# Tokens of passes that verify drafts. Up to the second a pass takes as long as reading the weights
# does, so that twice as many tokens take no longer; past it the sizes lie the third apart.
_FEWEST, _WEIGHT_BOUND, _STEP = 16, 128, 64


def _captures_decode_passes(manager: CudaGraphManager) -> bool:
    mode = manager.cudagraph_mode
    return mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL


def serve_any_mix(manager: CudaGraphManager) -> bool:
    """Lets the manager capture decode passes for any mix of 1 to ``decode_query_len`` tokens a
    request, in the place of those for batches in which all have as many: as vLLM does where it cuts
    proposals on the device. The attention's graphs must allow it
    (``get_varlen_cudagraph_unsupported_backend`` in vllm/v1/worker/gpu/attn_utils.py).

    Returns:
        whether it does.
    """
    if manager.varlen_decode or not _captures_decode_passes(manager):
        return manager.varlen_decode
    swaps.VARLEN_DECODE.set(manager, True)
    manager._candidates.clear()
    manager._capture_descs.clear()
    manager._init_candidates()
    return True


def thin_decode_graphs(manager: CudaGraphManager) -> None:
    """Keep few of the graphs for passes that verify drafts: beside those for plain decoding, which
    are as many as stock vLLM's, there would be as many again."""
    if manager.decode_query_len == 1 or not _captures_decode_passes(manager):
        return
    captured = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    # Of the sizes that a coarser one covers, the largest.
    kept = {
        (*_kind(desc), _coarse_size(desc.num_tokens)): desc
        for desc in sorted(captured, key=lambda desc: desc.num_tokens)
    }
    manager._capture_descs[CUDAGraphMode.FULL] = [d for d in captured if d in kept.values()]
    for (num_tokens, _), candidates in manager._candidates.items():
        own = [desc for desc in candidates if desc in captured]
        holding = [
            next(
                desc
                for desc in kept.values()
                if desc.num_tokens >= num_tokens and kind == _kind(desc)
            )
            for kind in dict.fromkeys(map(_kind, own))
        ]
        candidates[:] = [*holding, *(desc for desc in candidates if desc not in own)]


def _kind(desc: BatchExecutionDescriptor) -> tuple[int, int]:
    return desc.num_active_loras, desc.num_ubatches


def _coarse_size(num_tokens: int) -> int:
    if num_tokens <= _WEIGHT_BOUND:
        return max(_FEWEST, next_power_of_2(num_tokens))
    return round_up(num_tokens, _STEP)


def add_plain_decode_graphs(manager: CudaGraphManager) -> int:
    """Lets the manager capture, and choose, graphs of one token a request as well.

    vLLM does the same where the number of draft tokens depends on the batch size
    (``CudaGraphManager._init_candidates``).

    Returns:
        the number of graphs added.
    """
    if manager.decode_query_len == 1 or not _captures_decode_passes(manager):
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


def choose_decode_graphs(runner, target_layers: Iterable[str]) -> None:
    """Change which graphs the runner's new manager captures.

    vLLM makes a manager twice, the first time to measure what its graphs take: both times it
    has to know of all of them.
    """
    manager = runner.cudagraph_manager
    if manager is None or not _captures_decode_passes(manager):
        return
    unsupported = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups,
        runner.vllm_config,
        manager.decode_query_len,
        checked_layer_names=set(target_layers),
    )
    if unsupported is None:
        serve_any_mix(manager)
    thin_decode_graphs(manager)
    add_plain_decode_graphs(manager)


class _Quiet(CudaGraphManager):
    """Between vLLM's two classes, where each graph's pass is known."""

    recorder: StaticQueryRecorder

    def capture(self, create_forward_fn, *args, **kwargs) -> None:
        def create(desc, warmup: bool):
            forward = create_forward_fn(desc, warmup)
            if desc.uniform_token_count != 1:
                return forward

            def unheard(mode) -> None:
                with self.recorder.without_recording():
                    forward(mode)

            return unheard

        super().capture(create, *args, **kwargs)

    def dispatch(
        self, num_reqs, num_tokens, uniform_token_count, num_active_loras, *args, **kwargs
    ):
        if uniform_token_count == 1 and self.recorder.is_recording:
            uniform_token_count = None
        return super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, *args, **kwargs
        )


class PlainGraphsWithoutRecording(ModelCudaGraphManager, _Quiet):
    """Graphs for plain decoding that launch nothing for TriForce.

    Where somebody selects behind a step in which all decode one token, as before a request's first
    proposal, the batch takes another graph: one for any mix of lengths, or compiled pieces.
    """


def disable_recording_in_plain_graphs(runner, recorder: StaticQueryRecorder) -> None:
    """Before graphs are captured."""
    manager = runner.cudagraph_manager
    if manager is None or manager.decode_query_len == 1 or not _captures_decode_passes(manager):
        return
    quiet = PlainGraphsWithoutRecording.__new__(PlainGraphsWithoutRecording)
    # The same state: whoever else holds the manager sees the graphs that are captured.
    quiet.__dict__ = swaps.CUDAGRAPH_MANAGER.set(runner, quiet).__dict__
    quiet.recorder = recorder
