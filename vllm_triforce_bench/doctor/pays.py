"""From which context speculation would pay, by the model of time (docs/prediction.md)."""

from collections.abc import Callable
from typing import Any

from vllm_triforce_bench.doctor.layers import Layers
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine, machine_of
from vllm_triforce_bench.predict.settings import DRAFT, LOOKUP, PLAIN, Acceptance, settings
from vllm_triforce_bench.predict.steps import Predictor

_BATCHES = (1, 4, 16)
_LEAST_CONTEXT = 1024
# What is predicted to gain less is decoded plainly, as the controller does.
_LEAST_GAIN = 1.05


def pays(
    vllm_config,
    layers: Layers,
    machine: Machine | None,
    acceptances: list[Acceptance],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Predicted speed-ups over plain decoding, by batch, acceptance and context; or, under
    ``not_predicted``, why there are none.

    Args:
        machine: None: the one that this is.
        acceptances: of level 2's tokens, by the full pass.
        say: is told what takes a while.
    """
    from vllm_triforce.config.keys import METHOD

    try:
        predictor = _predictor(vllm_config, layers, machine, say)
    except ValueError as error:
        return {"not_predicted": str(error)}
    keys = vllm_config.additional_config[METHOD]
    sources = (DRAFT, LOOKUP) if predictor.draft else (LOOKUP,)
    among = settings(budgets=(keys["retrieval_budget"],), sources=sources)
    cells = [
        _cell(predictor, among, batch, acceptance, _contexts(vllm_config))
        for batch in _BATCHES
        if batch <= vllm_config.scheduler_config.max_num_seqs
        for acceptance in acceptances
    ]
    assumed = acceptances[0]
    return {
        "machine": predictor.machine.name,
        "assumed": {"draft_acceptance": assumed.draft, "lookup_acceptance": assumed.lookup},
        "cells": cells,
    }


def _predictor(vllm_config, layers: Layers, machine: Machine | None, say) -> Predictor:
    """
    Raises:
        ValueError: something is not counted in the model of time; says what.
    """
    from vllm_triforce.config.keys import METHOD

    keys = vllm_config.additional_config[METHOD]
    if keys["levels"] == "3" or keys["kv_offload_gib"] is not None:
        raise ValueError("KV in host memory: see 'vllm-triforce predict --offload'")
    if layers.dense:
        raise ValueError(f"{len(layers.dense)} layers stay dense, which is not counted yet")
    if layers.ranks > 1:
        raise ValueError(f"tensor parallelism ({layers.ranks} ranks) is not counted yet")
    target = _geometry(vllm_config.model_config)
    draft = None
    if keys["draft_model"]:
        draft = _geometry(vllm_config.speculative_config.draft_model_config)
    block_size = vllm_config.cache_config.block_size
    window = keys["num_sink_tokens"] + keys["num_recent_tokens"]
    found = machine or _this_machine(say)
    return Predictor(found, target, draft, window=window, chunk=block_size)


def _geometry(model_config) -> Geometry:
    name, config = model_config.model, model_config.hf_config.to_dict()
    return Geometry.from_config(name, config, str(model_config.dtype).removeprefix("torch."))


def _this_machine(say: Callable[[str], None]) -> Machine:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_triforce_bench.predict.constants import machine_now

        say("measuring this CPU for the prediction, some seconds; --machine FILE saves them")
        return machine_now()
    device = current_platform.get_device_name()
    if (machine := machine_of(device)) is None:
        raise ValueError(
            f"{device!r} is no machine that the model of time knows; give --machine, a name or a "
            "file with its figures (docs/prediction.md)"
        )
    return machine


def _contexts(vllm_config) -> list[int]:
    """Doubled, up to the longest."""
    longest = vllm_config.model_config.max_model_len
    found = [_LEAST_CONTEXT]
    while 2 * found[-1] < longest:
        found.append(2 * found[-1])
    return [*(context for context in found if context < longest), longest]


def _cell(predictor: Predictor, among, batch: int, acceptance: Acceptance, contexts) -> dict:
    found, pays_from = [], None
    for context in contexts:
        if not predictor.fits(context, batch):
            break
        best = predictor.best(among, context, batch, acceptance)
        is_gain = best.setting.route != PLAIN and best.speedup >= _LEAST_GAIN
        if not is_gain:
            pays_from = None
        elif pays_from is None:
            pays_from = context
        how = str(best.setting) if is_gain else PLAIN
        found.append(
            {"context": context, "speedup": best.speedup if is_gain else 1.0, "setting": how}
        )
    return {
        "batch": batch,
        "acceptance": acceptance.level2,
        "pays_from": pays_from,
        "contexts": found,
    }
