"""Predicted gains, break-even points and keys to choose (docs/doctor.md)."""

from collections.abc import Callable, Iterator
from typing import Any

from vllm_triforce.config import ResolvedConfig, read_config
from vllm_triforce_bench.doctor.choice import MIN_GAIN, choose
from vllm_triforce_bench.doctor.layers import Layers
from vllm_triforce_bench.doctor.memory import kv_bytes_each
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine, machine_of
from vllm_triforce_bench.predict.settings import (
    LEVELS,
    PLAIN,
    Acceptance,
    Setting,
    settings,
    sources_of,
)
from vllm_triforce_bench.predict.steps import Predictor

_BATCHES = (1, 4, 16)
_MIN_CONTEXT = 1024
# Context by which keys are chosen, or a quarter of the longest.
_TYPICAL_CONTEXT = 16_384


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
    longest = vllm_config.model_config.max_model_len
    batches = [n for n in _BATCHES if n <= vllm_config.scheduler_config.max_num_seqs]
    cells = [
        _cell(predictor, config, _contexts(predictor, longest, batch), batch, acceptance)
        for batch in batches
        for acceptance in acceptances
    ]
    results = {
        "machine": machine.name,
        "assumed": {
            "draft_acceptance": acceptances[0].draft,
            "lookup_acceptance": acceptances[0].lookup,
        },
        "cells": cells,
        "break_even": [
            {"batch": batch, "context": context, "routes": dict(routes)}
            for batch in batches
            for context in _contexts(predictor, longest, batch)
            for routes in [_break_even(predictor, config, context, batch, acceptances[0])]
        ],
    }
    if contexts := _contexts(predictor, longest, 1):
        typical = max(min(contexts[-1], _TYPICAL_CONTEXT), contexts[-1] // 4)
        context = next(context for context in contexts if context >= typical)
        results["choice"] = choose(predictor, vllm_config, layers, context, acceptances[-1])
    return results


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


def _contexts(predictor: Predictor, longest: int, batch: int) -> list[int]:
    """Return powers of two, then the longest context, as far as they fit the machine's memory."""
    powers = (_MIN_CONTEXT << n for n in range(longest.bit_length()))
    contexts = [*(context for context in powers if context < longest), longest]
    return [context for context in contexts if predictor.fits(context, batch)]


def _among(predictor: Predictor, config: ResolvedConfig, context: int) -> list[Setting]:
    return settings(config.budget_of(context), sources_of(config), config.levels)


def _cell(
    predictor: Predictor,
    config: ResolvedConfig,
    contexts: list[int],
    batch: int,
    acceptance: Acceptance,
) -> dict[str, Any]:
    by_context, pays_from = [], None
    for context in contexts:
        best = predictor.best(_among(predictor, config, context), context, batch, acceptance)
        is_gain = best.setting.route != PLAIN and best.speedup >= MIN_GAIN
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


def _break_even(
    predictor: Predictor, config: ResolvedConfig, context: int, batch: int, acceptance: Acceptance
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each route, a direct one by its source, and the point from which it pays, if any."""
    among: dict[str, list[Setting]] = {}
    for setting in _among(predictor, config, context)[1:]:
        route = LEVELS if setting.route == LEVELS else setting.source
        among.setdefault(route, []).append(setting)
    for route, group in among.items():
        point = predictor.break_even(group, context, batch, acceptance)
        if point is not None:
            values = {"tokens": point.tokens, "acceptance": point.acceptance}
            yield route, {**values, "setting": str(point.setting)}
        else:
            yield route, None
