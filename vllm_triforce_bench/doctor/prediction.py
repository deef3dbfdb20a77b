"""Context from which speculation is predicted to pay (docs/doctor.md)."""

from collections.abc import Callable
from typing import Any

from vllm_triforce.config import ResolvedConfig, read_config
from vllm_triforce_bench.doctor.layers import Layers
from vllm_triforce_bench.doctor.memory import kv_bytes_each
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine, machine_of
from vllm_triforce_bench.predict.settings import DRAFT, LOOKUP, PLAIN, Acceptance, settings
from vllm_triforce_bench.predict.steps import Predictor

_BATCHES = (1, 4, 16)
_MIN_CONTEXT = 1024
# Smaller gains count as plain decoding, as in the controller.
_MIN_GAIN = 1.05


def predict(
    vllm_config,
    layers: Layers,
    copy_bytes: int,
    machine: Machine | None,
    acceptances: list[Acceptance],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Predict speed-ups over plain decoding, by batch, acceptance and context.

    Args:
        copy_bytes: of level 2's copy of the target; 0 without one.
        machine: None for this one.
        acceptances: acceptances of level 2's tokens by the full pass.
        say: shows a line before slow work.

    Returns:
        The cells; or ``not_predicted``, the reason.
    """
    config, draft_model = read_config(vllm_config)
    try:
        _check_counted(config, layers)
        target = Geometry.read(vllm_config.model_config, kv_bytes_each(vllm_config))
        draft = None
        if draft_model:
            draft = Geometry.read_draft(vllm_config.speculative_config.draft_model_config)
        machine = machine or _this_machine(say)
    except ValueError as error:
        return {"not_predicted": str(error)}
    predictor = Predictor(
        machine,
        target,
        draft,
        window=config.window_tokens,
        chunk=config.block_size,
        copy_bytes_each=target.bytes_each * copy_bytes / layers.weight_bytes or None,
    )
    cells = [
        _cell(predictor, config, vllm_config.model_config.max_model_len, batch, acceptance)
        for batch in _BATCHES
        if batch <= vllm_config.scheduler_config.max_num_seqs
        for acceptance in acceptances
    ]
    level1 = {"draft_acceptance": acceptances[0].draft, "lookup_acceptance": acceptances[0].lookup}
    return {"machine": machine.name, "assumed": level1, "cells": cells}


def _check_counted(config: ResolvedConfig, layers: Layers) -> None:
    """
    Raises:
        ValueError: the model of time does not cover the configuration.
    """
    if config.is_plain or config.kv_offload_gib is not None:
        raise ValueError("KV in host memory is not counted; docs/offload.md has what to expect")
    if layers.dense:
        raise ValueError(f"{len(layers.dense)} layers stay dense, which is not counted yet")
    if layers.ranks > 1:
        raise ValueError(f"tensor parallelism ({layers.ranks} ranks) is not counted yet")


def _this_machine(say: Callable[[str], None]) -> Machine:
    """
    Raises:
        ValueError: the constants of this GPU are not known.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_triforce_bench.predict.cpu import measure_cpu

        say("measuring this CPU for the prediction, some seconds; --machine FILE saves them")
        return measure_cpu()
    device = current_platform.get_device_name()
    if (machine := machine_of(device)) is None:
        raise ValueError(
            f"{device!r} is no machine that the model of time knows; give --machine, a name or a "
            "file with its figures (docs/doctor.md)"
        )
    return machine


def _contexts(longest: int) -> list[int]:
    """Return powers of two, then the longest context."""
    powers = (_MIN_CONTEXT << n for n in range(longest.bit_length()))
    return [*(context for context in powers if context < longest), longest]


def _cell(
    predictor: Predictor, config: ResolvedConfig, longest: int, batch: int, acceptance: Acceptance
) -> dict[str, Any]:
    sources = (DRAFT, LOOKUP) if predictor.draft else (LOOKUP,)
    by_context, pays_from = [], None
    for context in _contexts(longest):
        if not predictor.fits(context, batch):
            break
        among = settings(config.budget_of(context), sources)
        best = predictor.best(among, context, batch, acceptance)
        is_gain = best.setting.route != PLAIN and best.speedup >= _MIN_GAIN
        # From where on it pays at every longer context.
        pays_from = (pays_from or context) if is_gain else None
        setting, speedup = (str(best.setting), best.speedup) if is_gain else (PLAIN, 1.0)
        by_context.append({"context": context, "speedup": speedup, "setting": setting})
    return {
        "batch": batch,
        "acceptance": acceptance.level2,
        "pays_from": pays_from,
        "contexts": by_context,
    }
