"""Context from which speculation is predicted to pay (docs/doctor.md)."""

from collections.abc import Callable
from typing import Any

from vllm_triforce.config import read_config
from vllm_triforce.config.check_head import is_head, is_mtp
from vllm_triforce.config.keys import METHOD
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
    try:
        predictor = _predictor(vllm_config, layers, copy_bytes, machine, say)
    except ValueError as error:
        return {"not_predicted": str(error)}
    config, _ = read_config(vllm_config)
    sources = (DRAFT, LOOKUP) if predictor.draft else (LOOKUP,)
    by_context = {
        context: settings(config.budget_of(context), sources) for context in _contexts(vllm_config)
    }
    cells = [
        _cell(predictor, by_context, batch, acceptance)
        for batch in _BATCHES
        if batch <= vllm_config.scheduler_config.max_num_seqs
        for acceptance in acceptances
    ]
    level1 = {"draft_acceptance": acceptances[0].draft, "lookup_acceptance": acceptances[0].lookup}
    return {"machine": predictor.machine.name, "assumed": level1, "cells": cells}


def _predictor(
    vllm_config, layers: Layers, copy_bytes: int, machine: Machine | None, say
) -> Predictor:
    """
    Raises:
        ValueError: the configuration or the machine is not covered by the model of time.
    """
    keys = vllm_config.additional_config[METHOD]
    if keys["levels"] == "3" or keys["kv_offload_gib"] is not None:
        raise ValueError("KV in host memory is not counted; docs/offload.md has what to expect")
    if layers.dense:
        raise ValueError(f"{len(layers.dense)} layers stay dense, which is not counted yet")
    if layers.ranks > 1:
        raise ValueError(f"tensor parallelism ({layers.ranks} ranks) is not counted yet")
    target = _geometry(vllm_config.model_config, kv_bytes_each(vllm_config))
    draft = None
    if keys["draft_model"]:
        draft_config = vllm_config.speculative_config.draft_model_config
        draft = _geometry(draft_config)
        if is_mtp(draft_config.hf_config):
            draft = draft.as_mtp()
        elif is_head(draft_config.hf_config):
            sizes = ("draft_vocab_size", "target_hidden_size")
            draft = draft.as_head(*(getattr(draft_config.hf_config, name, None) for name in sizes))
    copy_bytes_each = None
    if copy_bytes:
        copy_bytes_each = target.bytes_each * copy_bytes / layers.weight_bytes
    return Predictor(
        machine or _this_machine(say),
        target,
        draft,
        window=(keys["num_sink_tokens"] or 0) + keys["num_recent_tokens"],
        chunk=vllm_config.cache_config.block_size,
        copy_bytes_each=copy_bytes_each,
    )


def _geometry(model_config, kv_bytes: int | None = None) -> Geometry:
    config, dtype = model_config.hf_config.to_dict(), str(model_config.dtype)
    dtype = dtype.removeprefix("torch.")
    return Geometry.from_config(model_config.model, config, dtype, kv_bytes)


def _this_machine(say: Callable[[str], None]) -> Machine:
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


def _contexts(vllm_config) -> list[int]:
    """Powers of two, then the longest context."""
    longest = vllm_config.model_config.max_model_len
    contexts, context = [], _MIN_CONTEXT
    while context < longest:
        contexts.append(context)
        context *= 2
    return [*contexts, longest]


def _cell(
    predictor: Predictor, settings_by_context: dict, batch: int, acceptance: Acceptance
) -> dict:
    by_context, pays_from = [], None
    for context, among in settings_by_context.items():
        if not predictor.fits(context, batch):
            break
        best = predictor.best(among, context, batch, acceptance)
        is_gain = best.setting.route != PLAIN and best.speedup >= _MIN_GAIN
        if not is_gain:
            pays_from = None
        elif pays_from is None:
            pays_from = context
        by_context.append(
            {
                "context": context,
                "speedup": best.speedup if is_gain else 1.0,
                "setting": str(best.setting) if is_gain else PLAIN,
            }
        )
    return {
        "batch": batch,
        "acceptance": acceptance.level2,
        "pays_from": pays_from,
        "contexts": by_context,
    }
