"""What Model Runner V2 does with proposals before the first request comes."""

from contextlib import nullcontext

import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.worker.v2.build import DeviceBuild
from vllm_triforce.worker.v2.calibration import CalibrationV2
from vllm_triforce.worker.v2.trial_batches import TrialBatches


@torch.inference_mode()
def warm_up_proposals(
    config: ResolvedConfig,
    runner,
    built: DeviceBuild,
    num_blocks: int,
    device: torch.device,
    measures: bool,
) -> Measurements | None:
    """Runs every kind of proposal once on a GPU, where kernels are compiled for it.

    Args:
        measures: whether they are timed.

    Returns:
        What passes take; None where they are not timed.
    """
    is_gpu = device.type != "cpu"
    if not (is_gpu or measures):
        return None
    calibration = CalibrationV2(
        config,
        runner._dummy_run,
        built.triforce,
        TrialBatches(built, runner, num_blocks, device),
        max(1, runner.max_model_len - 2 * config.num_speculative_tokens - 4),
        runner.max_num_reqs,
        runner.max_num_tokens,
        num_blocks * min(runner.block_tables.block_sizes) // len(runner.block_tables.block_sizes),
        device,
    )
    # Requests that have left still have theirs, as those that vLLM warms up with: that they have
    # is seen in the next step.
    for request_id in built.slots.request_ids():
        built.slots.release(request_id)
    trials = nullcontext() if built.adapters is None else built.adapters.trials()
    with built.recorder.pausing(), trials:
        if is_gpu:
            calibration.warm_up()
        measured = calibration.run() if measures else None
    built.triforce.reset_counters()
    return measured
