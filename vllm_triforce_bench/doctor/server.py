"""Speculation on a running server, from its ``/metrics``, and advice by what they say."""

import http.client
import time
import urllib.error
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_triforce.metrics.counters import COUNTERS, PROPOSE_SECONDS, LevelCounters
from vllm_triforce_bench.metrics import read_metrics
from vllm_triforce_bench.options import BadInput

_TIMEOUT_S = 10
_TRIFORCE = "vllm:triforce_"
_OTHER_METHOD = "vllm:spec_decode_num_drafts_total"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", _KV_USAGE)
_FEW_TOKENS = 500
"""Generated or tested tokens below which a share says little."""
_FEW_PROPOSED = 0.05
"""Proposed tokens for each generated one below which decoding is plain."""
_MOSTLY = 0.5
_SHORT_PROMPT = 2000
_LOW_LEVEL1, _LOW_DIRECT, _LOW_LEVEL2 = 0.25, 0.5, 0.85
_MANY_PREEMPTIONS = 10

Values = Mapping[str, float]
"""Sums over a model's engines, by name of the sample, but the use of the KV cache that is fullest;
times of proposing by name and part."""


def examine_server(url: str, seconds: float) -> dict[str, Any]:
    """Read a server's counters, and judge them.

    Args:
        url: address of the server, with or without ``/metrics``.
        seconds: time between two readings that are compared; 0 for all since the server's start.

    Returns:
        The content of ``--json``: ``runs`` is True if TriForce runs there.

    Raises:
        BadInput: it cannot be read, or was started again between the readings.
    """
    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    now = _read(base)
    if seconds:
        before = now
        time.sleep(seconds)
        now = {
            model: _since(values, before.get(model, {})) for model, values in _read(base).items()
        }
    models = [{"model": model, **figures(values)} for model, values in now.items()]
    return {
        "url": base,
        "seconds": seconds or None,
        "models": models,
        "runs": any(model["levels"] is not None for model in models),
    }


def figures(values: Values) -> dict[str, Any]:
    levels = _levels(values)
    generated = values["vllm:generation_tokens_total"]
    prompts = values["vllm:request_prompt_tokens_count"]
    results: dict[str, Any] = {
        "running": values["vllm:num_requests_running"],
        "waiting": values["vllm:num_requests_waiting"],
        "kv_cache_usage": values[_KV_USAGE],
        "generated_tokens": generated,
        "mean_prompt_tokens": (
            values["vllm:request_prompt_tokens_sum"] / prompts if prompts else None
        ),
        "preemptions": values["vllm:num_preemptions_total"],
        "has_other_method": levels is None and _OTHER_METHOD in values,
        "levels": None,
    }
    if levels is not None:
        accepted = min(levels.num_level2_accepted, generated)
        results["levels"] = levels.to_dict()
        results["accepted_share"] = accepted / generated if generated else 0.0
    return {**results, "advice": list(advice(results))}


def _levels(values: Values) -> LevelCounters | None:
    """Return TriForce's counters, or None if the server has none."""
    if not any(name.startswith(_TRIFORCE) for name in values):
        return None
    counts: dict[str, Any] = {
        name: values[f"{_TRIFORCE}{row.metric}_total"] for name, row in COUNTERS.items()
    }
    counts |= {n: round(value) for n, value in counts.items() if COUNTERS[n].unit != "seconds"}
    times = f"{_TRIFORCE}{PROPOSE_SECONDS.metric}_total "
    parts = {
        name.removeprefix(times).replace("_", " "): seconds
        for name, seconds in values.items()
        if name.startswith(times)
    }
    return LevelCounters(**counts, time_seconds=parts)


def _read(base: str) -> Mapping[str, Values]:
    if not base.startswith(("http://", "https://")):
        raise BadInput(f"--url {base!r} has no http:// or https://; give the server's address")
    url = f"{base}/metrics"
    try:
        samples = read_metrics(base, _TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise BadInput(f"{url} answers {error.code}; give the address of a vLLM server") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise BadInput(
            f"{url} cannot be read ({reason}); give the address of a vLLM server"
        ) from error
    models: dict[str, defaultdict[str, float]] = {}
    for sample in samples:
        model = sample.labels.get("model_name")
        if model is not None and sample.name.startswith("vllm:"):
            part = sample.labels.get("part")
            name = sample.name if part is None else f"{sample.name} {part}"
            values = models.setdefault(model, defaultdict(float))
            if name == _KV_USAGE:
                values[name] = max(values[name], sample.value)
            else:
                values[name] += sample.value
    if not models:
        raise BadInput(
            f"{url} has no metrics of vLLM; another service answers there, "
            "the server runs with --disable-log-stats, or its metrics go through Ray"
        )
    return models


def _since(values: Values, before: Values) -> Values:
    """Return the increments of the counters, and the gauges as they are.

    Raises:
        BadInput: a counter fell.
    """
    added: defaultdict[str, float] = defaultdict(float)
    for name, value in values.items():
        added[name] = value if name in _GAUGES else value - before.get(name, 0.0)
        if name.endswith("_total") and added[name] < 0:
            raise BadInput("the server was started again between the two readings; try again")
    return added


def advice(figures: dict[str, Any]) -> Iterator[str]:
    """Yield what the figures suggest, each with the key to change."""
    levels, generated = figures["levels"], figures["generated_tokens"]
    if levels is None:
        if figures["has_other_method"]:
            yield "another speculative method runs here, not TriForce"
        else:
            yield "TriForce does not run here; start the server with --speculative-model triforce"
        return
    if levels["num_boundary_faults"]:
        yield "boundary_faults is above 0: see docs/troubleshooting.md; the output is exact"
    if levels["num_nan_requests"]:
        yield "nan_requests is above 0: see docs/troubleshooting.md; the output is not affected"
    if figures["preemptions"] > _MANY_PREEMPTIONS:
        yield (
            f"requests lost their KV cache to others {figures['preemptions']:,.0f} times: lower "
            "max_num_seqs, raise gpu_memory_utilization, or use kv_offload_gib"
        )
    if generated < _FEW_TOKENS:
        yield f"fewer than {_FEW_TOKENS} tokens were generated; ask again after more traffic"
        return
    if levels["num_proposed"] < _FEW_PROPOSED * generated:
        yield _why_plain(figures)
        return
    needed = levels["break_even_tokens"]
    if (
        levels["num_level3_steps"] >= _FEW_TOKENS
        and needed is not None
        and levels["mean_acceptance_length"] < needed
    ):
        yield _BELOW_BREAK_EVEN
    tested = levels["num_level2_accepted"] + levels["num_level3_rejections"]
    is_direct = levels["num_direct_proposals"] > _MOSTLY * levels["num_proposals"]
    low = _LOW_DIRECT if is_direct else _LOW_LEVEL2
    if tested >= _FEW_TOKENS and levels["level2_acceptance_per_test"] < low:
        yield _BETTER_DRAFT.format("full passes reject") if is_direct else _LARGER_BUDGET
    if (
        levels["num_level1_drafted"] >= _FEW_TOKENS
        and levels["level1_acceptance_rate"] < _LOW_LEVEL1
    ):
        yield _BETTER_DRAFT.format("level 2 rejects")


_BELOW_BREAK_EVEN = (
    "speculation takes more time here than its tokens save: leave num_speculative_tokens, gamma "
    "and min_context to the controller, or lower max_slowdown"
)
_LARGER_BUDGET = (
    "full passes reject many tokens of level 2: raise retrieval_budget (each doubling has added "
    "0.02 to 0.03 of acceptance); vllm-triforce lab measures it on your text"
)
_BETTER_DRAFT = (
    "{} most tokens of level 1: name a draft model or an EAGLE-3 head by 'model', or a better one; "
    "if lengths are fixed (adaptive false), let the controller choose them"
)


def _why_plain(figures: dict[str, Any]) -> str:
    length = figures["mean_prompt_tokens"]
    if length is not None and length < _SHORT_PROMPT:
        return (
            f"nearly all tokens are decoded plainly: with prompts of {length:,.0f} tokens the KV "
            "cache is a small part of what a step reads. TriForce is for longer ones"
        )
    return (
        "nearly all tokens are decoded plainly: by the controller's measurements speculation does "
        "not pay for this text and batch. A draft model or an EAGLE-3 head ('model') may change "
        "that, or smaller batches; vllm-triforce bench compares them"
    )
