"""Cells of a prediction with KV in host memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm_triforce.offload.placement import all_would_fit
from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import Geometry, draft_of
from vllm_triforce_bench.predict.machine import GIB, Machine
from vllm_triforce_bench.predict.offload import DoesNotFit, OffloadedPredictor, offload_config
from vllm_triforce_bench.predict.settings import STOCK, Acceptance, Setting
from vllm_triforce_bench.predict.steps import Predictor, Step

# Tokens that follow the context, as in the paper.
_GENERATED = 256
# The project's targets with 24 GB, times plain decoding from host memory.
_TARGET_ALL_HEADS, _TARGET_GROUPED = 7.0, 5.0


def with_memory(machine: Machine, gib: float) -> Machine:
    """The machine, of whose memory no more than this is used."""
    return replace(machine, memory_bytes=min(machine.memory_bytes, gib * GIB))


def engine(
    machine: Machine,
    model: Geometry,
    context: int,
    batch: int,
    among: Sequence[Setting],
    counts: Counts,
) -> OffloadedPredictor:
    """Of an engine that is started for this batch, with host memory for all of its KV.

    Raises:
        ValueError: the machine's ``host_bandwidth`` is unknown.
        DoesNotFit: on the device.
    """
    tokens = batch * (context + 2 * _GENERATED)
    config = offload_config(
        math.ceil(tokens * model.kv_bytes_per_token / GIB),
        batch,
        max((setting.num_tokens for setting in among), default=0) or 1,
        max((setting.budget for setting in among), default=0) or 1,
    )
    return OffloadedPredictor(
        machine,
        model,
        draft_of(model),
        counts,
        config=config,
        max_num_seqs=batch,
        max_model_len=context + _GENERATED,
    )


def first_batch_beyond(machine: Machine, model: Geometry, context: int) -> int:
    """The smallest power of two whose KV does not fit the device."""
    predictor, batch = Predictor(machine, model, draft_of(model)), 1
    while predictor.fits(context, batch):
        batch *= 2
    return batch


def offload_cells(
    machines: Iterable[Machine],
    models: Iterable[Geometry],
    contexts: Sequence[int],
    batches: Sequence[int],
    acceptances: Sequence[Acceptance],
    among: Sequence[Setting],
    counts: Counts,
) -> list[dict]:
    """One for each machine, model, context and batch, with plain decoding from host memory and the
    best step at each acceptance.

    Raises:
        ValueError: a machine's ``host_bandwidth`` is unknown.
    """
    models = list(models)
    return [
        offload_cell(machine, model, context, batch, acceptances, among, counts)
        for machine in machines
        for model in models
        for context in contexts
        for batch in batches
    ]


def offload_cell(
    machine: Machine,
    model: Geometry,
    context: int,
    batch: int,
    acceptances: Sequence[Acceptance],
    among: Sequence[Setting],
    counts: Counts,
) -> dict:
    """
    Returns:
        For JSON; ``share_of_limit`` is of a token's time what its share of a full pass's bytes
        takes from host memory at ``host_bandwidth``, which nothing undercuts. ``plain`` is the same
        engine, ``plain_alone`` one that has no pool and no chunk summaries on the device.
    """
    place = {"machine": machine.name, "model": model.name, "context": context, "batch": batch}
    place |= {"kind": "predicted", "device_gib": machine.memory_bytes / GIB}
    try:
        its = engine(machine, model, context, batch, among, counts)
    except DoesNotFit as error:
        return place | {"fits": False, "why": str(error)}
    placement, bare = its.placement, its.without_speculation()
    crossing_bytes = its.full_pass_bytes([context] * batch)
    crossing = its.crossing(crossing_bytes)
    plain, lone = (e.step(STOCK, context, batch, acceptances[0]) for e in (its, bare))
    crossing_lone = bare.crossing(bare.full_pass_bytes([context] * batch))
    best = [its.best(among, context, batch, acceptance) for acceptance in acceptances]
    has_all_heads = model.heads == model.kv_heads
    return place | {
        "fits": True,
        "all_would_fit": all_would_fit(placement, its.device_bytes, its.summary_share),
        "layers": placement.num_layers,
        "device_layers": placement.num_device_layers,
        "host_gib": placement.host_bytes / GIB,
        "crossing_gb": crossing_bytes / 1e9,
        "crossing_ms": 1e3 * crossing,
        "target": _TARGET_ALL_HEADS if has_all_heads else _TARGET_GROUPED,
        "plain": _step(plain, batch, crossing),
        "plain_alone": {
            "device_layers": bare.placement.num_device_layers,
            **_step(lone, batch, crossing_lone),
        },
        "best": [
            {
                "acceptance": a.level2,
                "speedup_over_plain_alone": lone.seconds * step.tokens / step.seconds,
                **_step(step, batch, crossing),
            }
            for a, step in zip(acceptances, best)
        ],
    }


def _step(step: Step, batch: int, crossing: float) -> dict:
    return {
        "setting": str(step.setting),
        "speedup": step.speedup,
        "tokens": step.tokens,
        "tokens_per_second": batch * step.tokens / step.seconds,
        "ms_per_token": 1e3 * step.seconds / step.tokens,
        "share_of_limit": crossing / step.seconds,
    }
