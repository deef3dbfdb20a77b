"""Keys of the predicted best configuration, and the gain by each."""

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_triforce.config import read_config
from vllm_triforce.config.keys import METHOD
from vllm_triforce.config.level2 import check_level2_model
from vllm_triforce_bench.doctor.layers import Layers
from vllm_triforce_bench.doctor.memory import level2_model_bytes
from vllm_triforce_bench.predict.settings import DRAFT, Acceptance, settings, sources_of
from vllm_triforce_bench.predict.steps import Predictor

# Smaller gains count as none, as in the controller.
MIN_GAIN = 1.05
# Copies of the target, and the growth of level 2's rejections by each (docs/results.md, SmolLM2).
_COPIES = {"bfloat16": 1.0, "fp8": 1.35}
_BUDGETS = (1024, 2048, 4096, 8192, 16384)
# Acceptance of an EAGLE-3 head's tokens by level 2, and the share of the vocabulary that it drafts.
HEAD_ACCEPTANCE, _HEAD_VOCAB_SHARE = 0.65, 1 / 4
# Value of the key ``model``: no head is known to the doctor by name.
HEAD = "HEAD"


@dataclass(frozen=True)
class _Configuration:
    """Configuration that is predicted for one request.

    Args:
        levels: key of that name.
    """

    predictor: Predictor
    context: int
    budget: int
    levels: str
    sources: tuple[str, ...]
    acceptance: Acceptance

    @property
    def speedup(self) -> float:
        if not self.predictor.fits(self.context, 1):
            return 0.0
        among = settings(self.budget, self.sources, self.levels)
        return self.predictor.best(among, self.context, 1, self.acceptance).speedup


_Change = Callable[[_Configuration], _Configuration]


def choose(
    predictor: Predictor, vllm_config, layers: Layers, context: int, acceptance: Acceptance
) -> dict[str, Any]:
    """Add the key with the largest predicted gain, while one gains 5 %.

    A head comes last, since the doctor knows none by name.

    Args:
        context: tokens of the one request that is predicted.
    """
    config, draft = read_config(vllm_config)
    present = _Configuration(
        predictor,
        context,
        config.budget_of(context),
        config.levels,
        sources_of(config),
        acceptance,
    )
    candidates: list[tuple[str, Any, _Change]] = []
    if config.uses_level2:
        candidates += [
            ("retrieval_budget", n, _budget(n))
            for n in _BUDGETS
            if config.retrieval_recent_tokens < n < context
        ]
        if config.level2_model is None:
            candidates += _copies(predictor, vllm_config, layers)
    keys: list[dict[str, Any]] = []
    first = present.speedup

    def add(name: str, value: Any, change: _Change) -> bool:
        nonlocal present
        before, after = present.speedup, change(present)
        if after.speedup < MIN_GAIN * before:
            return False
        keys.append({"key": name, "value": value, "from": before, "to": after.speedup})
        present = after
        return True

    while candidates:
        best = max(candidates, key=lambda candidate: candidate[2](present).speedup)
        if not add(*best):
            break
        candidates = [candidate for candidate in candidates if candidate[0] != best[0]]
    if draft is None and "1" in config.levels and _may_have_head(vllm_config):
        add("model", HEAD, _with_head)
    return {
        "context": context,
        "acceptance": acceptance.level2,
        "head_acceptance": HEAD_ACCEPTANCE,
        "speedup": first,
        "keys": keys,
    }


def _budget(num_tokens: int) -> _Change:
    return lambda present: replace(present, budget=num_tokens)


def _copies(
    predictor: Predictor, vllm_config, layers: Layers
) -> Iterator[tuple[str, str, _Change]]:
    """Yield the copies that the target, and the machine of the prediction, may have."""
    import torch

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
        yield "level2_model", name, _copy(share * predictor.model.bytes_each, rejections)


def _copy(bytes_each: float, rejections: float) -> _Change:
    def change(present: _Configuration) -> _Configuration:
        accepted = present.acceptance
        lowered = replace(accepted, copy_rejections=rejections)
        predictor = replace(present.predictor, copy_bytes_each=bytes_each)
        return replace(present, predictor=predictor, acceptance=lowered)

    return change


def _may_have_head(vllm_config) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    return supports_eagle3(get_model_cls(vllm_config.model_config))


def _with_head(present: _Configuration) -> _Configuration:
    target = present.predictor.model
    inner = target.inner * max(1, target.active_experts) + target.shared_inner
    layer = replace(target, layers=1, inner=inner, experts=0, shared_inner=0)
    head = layer.as_head(int(target.vocab * _HEAD_VOCAB_SHARE), target.hidden)
    return replace(
        present,
        predictor=replace(present.predictor, draft=head),
        sources=(DRAFT, *present.sources),
        acceptance=replace(present.acceptance, draft=HEAD_ACCEPTANCE),
    )


def command(model: str, options: list[str], keys: dict[str, Any]) -> str:
    """Return the command line of ``vllm serve`` with further keys.

    Args:
        options: those given to the doctor.
    """
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
