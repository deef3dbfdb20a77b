"""Predicted gains, break-even points and keys to choose (docs/doctor.md)."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_triforce.config import ResolvedConfig, read_config
from vllm_triforce.config.keys import METHOD
from vllm_triforce.config.level2 import check_level2_model, has_recurrent_layers
from vllm_triforce_bench.doctor.layers import Layers, kv_bytes_each, level2_model_bytes
from vllm_triforce_bench.predict import steps
from vllm_triforce_bench.predict.geometry import Geometry
from vllm_triforce_bench.predict.machine import Machine, machine_of
from vllm_triforce_bench.predict.steps import Acceptance, Predictor, Setting

_BATCHES = (1, 4, 16)
# The shortest context, and that by which keys are chosen, or a quarter of the longest.
_MIN_CONTEXT, _TYPICAL_CONTEXT = 1024, 16_384
# Smaller gains count as none, as in the controller.
MIN_GAIN = 1.05
# Copies of the target, and the growth of level 2's rejections by each (docs/results.md, SmolLM2).
_COPIES = {"bfloat16": 1.0, "fp8": 1.35}
_BUDGETS = (1024, 2048, 4096, 8192, 16384)
# Acceptance of an EAGLE-3 head's tokens by level 2, and the share of the vocabulary that it drafts.
HEAD_ACCEPTANCE, _HEAD_VOCAB_SHARE = 0.65, 1 / 4
HEAD = "HEAD"  # value of the key ``model``: no head is known to the doctor by name


def predict(
    vllm_config,
    layers: Layers,
    copy_bytes: int,
    machine: Machine | None,
    level2_acceptances: list[float],
) -> dict[str, Any]:
    """Predict speed-ups over plain decoding, by batch, acceptance and context.

    Args:
        copy_bytes: of level 2's copy of the target; 0 without one.
        machine: None for this one.

    Returns:
        The cells; or ``not_predicted``, the reason.
    """
    config, draft_model = read_config(vllm_config)
    acceptances = list(map(Acceptance, level2_acceptances))
    try:
        _check_counted(vllm_config, config, layers)
        target = Geometry.read(vllm_config.model_config, kv_bytes_each(vllm_config))
        draft = None
        if draft_model:
            draft = Geometry.read_draft(vllm_config.speculative_config.draft_model_config)
        machine = machine or _this_machine()
    except ValueError as error:
        return {"not_predicted": str(error)}
    copy_bytes_each = target.bytes_each * copy_bytes / layers.weight_bytes or None
    predictor = Predictor(
        machine, target, draft, config.window_tokens, config.block_size, copy_bytes_each
    )
    longest = vllm_config.model_config.max_model_len
    # Powers of two, then the longest context, as far as they fit the machine's memory.
    lengths = sorted({min(_MIN_CONTEXT << n, longest) for n in range(longest.bit_length())})
    contexts = {
        batch: [length for length in lengths if predictor.fits(length, batch)]
        for batch in _BATCHES
        if batch <= vllm_config.scheduler_config.max_num_seqs
    }
    first = acceptances[0]
    results = {
        "machine": machine.name,
        "assumed": {"draft_acceptance": first.draft, "lookup_acceptance": first.lookup},
        "cells": [
            _cell(predictor, config, contexts[batch], batch, acceptance)
            for batch in contexts
            for acceptance in acceptances
        ],
        "break_even": [
            _break_even(predictor, config, context, batch, first)
            for batch in contexts
            for context in contexts[batch]
        ],
    }
    if alone := contexts[1]:
        typical = max(min(alone[-1], _TYPICAL_CONTEXT), alone[-1] // 4)
        context = next(context for context in alone if context >= typical)
        results["choice"] = _choose(predictor, vllm_config, layers, context, acceptances[-1])
    return results


def _check_counted(vllm_config, config: ResolvedConfig, layers: Layers) -> None:
    """Raise ValueError if the engine does something that no price includes."""
    if config.is_plain or config.kv_offload_gib is not None:
        raise ValueError("KV in host memory is not counted; docs/offload.md has what to expect")
    if has_recurrent_layers(vllm_config.model_config):
        raise ValueError("recurrent layers, and level 2's states of them, are not counted")
    if layers.dense:
        raise ValueError(f"{len(layers.dense)} layers stay dense, which is not counted yet")
    if layers.ranks > 1:
        raise ValueError(f"tensor parallelism ({layers.ranks} ranks) is not counted yet")


def _this_machine() -> Machine:
    """Raise ValueError if the constants of this GPU are not known."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_triforce_bench.predict.cpu import measure_cpu

        text = "measuring this CPU for the prediction, some seconds; --machine FILE saves them"
        print(text, file=sys.stderr)
        return measure_cpu()
    device = current_platform.get_device_name()
    if (machine := machine_of(device)) is None:
        raise ValueError(
            f"{device!r} is no machine that the model of time knows; give --machine, a name or a "
            "file with its figures (docs/doctor.md)"
        )
    return machine


def _among(config: ResolvedConfig, context: int) -> list[Setting]:
    return steps.settings(config.budget_of(context), steps.sources_of(config), config.levels)


def _cell(
    predictor: Predictor,
    config: ResolvedConfig,
    contexts: list[int],
    batch: int,
    acceptance: Acceptance,
) -> dict[str, Any]:
    by_context, pays_from = [], None
    for context in contexts:
        best = predictor.best(_among(config, context), context, batch, acceptance)
        is_gain = best.setting.route != steps.PLAIN and best.speedup >= MIN_GAIN
        # From where on it pays at every longer context.
        pays_from = (pays_from or context) if is_gain else None
        setting, speedup = (str(best.setting), best.speedup) if is_gain else (steps.PLAIN, 1.0)
        by_context.append({"context": context, "speedup": speedup, "setting": setting})
    return {
        "batch": batch,
        "acceptance": acceptance.level2,
        "pays_from": pays_from,
        "contexts": by_context,
    }


def _break_even(
    predictor: Predictor, config: ResolvedConfig, context: int, batch: int, acceptance: Acceptance
) -> dict[str, Any]:
    """Return the point from which each route pays, if any; direct routes are named by source."""
    among: dict[str, list[Setting]] = {}
    for setting in _among(config, context)[1:]:
        route = steps.LEVELS if setting.route == steps.LEVELS else setting.source
        among.setdefault(route, []).append(setting)
    routes: dict[str, dict[str, Any] | None] = {}
    for route, group in among.items():
        routes[route] = None
        if (point := predictor.break_even(group, context, batch, acceptance)) is not None:
            routes[route] = point | {"setting": str(point["setting"])}
    return {"batch": batch, "context": context, "routes": routes}


# The choice of keys.


def _choose(
    predictor: Predictor, vllm_config, layers: Layers, context: int, acceptance: Acceptance
) -> dict[str, Any]:
    """Add the key with the largest predicted gain, while one gains 5 %.

    A head comes last, since the doctor knows none by name.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    config, draft = read_config(vllm_config)
    present: dict[str, Any] = {
        "predictor": predictor,
        "acceptance": acceptance,
        "budget": config.budget_of(context),
        "sources": steps.sources_of(config),
    }

    def speedup(changes: dict[str, Any]) -> float:
        changed = present | changes
        if not changed["predictor"].fits(context, 1):
            return 0.0
        among = steps.settings(changed["budget"], changed["sources"], config.levels)
        return changed["predictor"].best(among, context, 1, changed["acceptance"]).speedup

    candidates = list(_candidates(predictor, acceptance, vllm_config, layers, context))
    keys: list[dict[str, Any]] = []
    first = speedup({})

    def add(name: str, value: Any, changes: dict[str, Any]) -> bool:
        before, after = speedup({}), speedup(changes)
        if after < MIN_GAIN * before:
            return False
        keys.append({"key": name, "value": value, "from": before, "to": after})
        present.update(changes)
        return True

    while candidates:
        best = max(candidates, key=lambda candidate: speedup(candidate[2]))
        if not add(*best):
            break
        candidates = [candidate for candidate in candidates if candidate[0] != best[0]]
    has_no_draft = draft is None and "1" in config.levels
    if has_no_draft and supports_eagle3(get_model_cls(vllm_config.model_config)):
        with_head = {
            "predictor": replace(present["predictor"], draft=_head(predictor.model)),
            "acceptance": replace(present["acceptance"], draft=HEAD_ACCEPTANCE),
            "sources": (steps.DRAFT, *present["sources"]),
        }
        add("model", HEAD, with_head)
    return {
        "context": context,
        "acceptance": acceptance.level2,
        "head_acceptance": HEAD_ACCEPTANCE,
        "speedup": first,
        "keys": keys,
    }


def _candidates(
    predictor: Predictor, acceptance: Acceptance, vllm_config, layers: Layers, context: int
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield level 2's keys, their values, and what these change; a key at a time is taken."""
    config, _ = read_config(vllm_config)
    for n in _BUDGETS if config.uses_level2 else ():
        if config.retrieval_recent_tokens < n < context:
            yield "retrieval_budget", n, {"budget": n}
    if config.uses_level2 and config.level2_model is None:
        yield from _copies(predictor, acceptance, vllm_config, layers)


def _head(target: Geometry) -> Geometry:
    """Return an EAGLE-3 head of the target's sizes."""
    inner = target.inner * max(1, target.active_experts) + target.shared_inner
    layer = replace(target, layers=1, inner=inner, experts=0, shared_inner=0)
    return layer.as_head(int(target.vocab * _HEAD_VOCAB_SHARE), target.hidden)


def _copies(
    predictor: Predictor, acceptance: Acceptance, vllm_config, layers: Layers
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the copies that the target, and the machine of the prediction, may have."""
    for name, rejections in _COPIES.items():
        # vLLM has fp8 kernels on GPUs; without AVX-512, a CPU's bfloat16 is slower than float32.
        is_gpu = bool(predictor.machine.num_sms)
        if not is_gpu and (name == "fp8" or torch.backends.cpu.get_cpu_capability() != "AVX512"):
            continue
        try:
            check_level2_model(name, vllm_config)
        except ValueError:
            continue
        share = level2_model_bytes(name, vllm_config, layers) / layers.weight_bytes
        with_copy = {
            "predictor": replace(predictor, copy_bytes_each=share * predictor.model.bytes_each),
            "acceptance": replace(acceptance, copy_rejections=rejections),
        }
        yield "level2_model", name, with_copy


def command(model: str, options: list[str], keys: dict[str, Any]) -> str:
    """Return the command line of ``vllm serve`` with the doctor's options and further keys."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-config", "--speculative_config", "-sc", default="{}")
    parser.add_argument("--speculative-model", "--speculative_model", "--spec-method")
    given, others = parser.parse_known_args(options)
    parts = ["vllm", "serve", model, *others, "--speculative-model", METHOD]
    if any(re.match(r"(--speculative[-_]config|-sc)\.", option) for option in others):
        for name, value in keys.items():
            parts += [f"--speculative-config.{name}", str(value)]
    elif merged := {**json.loads(given.speculative_config), **keys}:
        parts += ["--speculative-config", json.dumps(merged)]
    return shlex.join(parts)
