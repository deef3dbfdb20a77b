"""Times real passes in vLLM on this CPU, for ``validate.py`` to set predictions beside.

Models of real sizes with random weights; their KV caches are filled by vLLM's
``DecodeBenchConnector``, so that no prompt has to be read. Stock vLLM and TriForce with fixed
lengths each decode some steps; random weights accept what they accept, and rounds are counted. What
the machine can do is measured anew before and after each cell.
"""

import gc
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from vllm_triforce_bench.predict.constants import between, machine_now
from vllm_triforce_bench.predict.geometry import Geometry, draft_of
from vllm_triforce_bench.predict.settings import DIRECT, DRAFT, LEVELS, PLAIN, STOCK, Setting

# A model of next to no size: its step is what vLLM's engine takes.
TINY = Geometry("tiny", 128, 2, 4, 2, 32, 256, 512).with_bytes(4)
MODELS = (
    Geometry("0.5b-mha", 1024, 24, 16, 16, 64, 4096, 32000).with_bytes(4),
    Geometry("1b-gqa", 2048, 16, 32, 8, 64, 8192, 128256, is_tied=True).with_bytes(4),
)
_CELLS = ((8192, 1), (16_384, 1), (32_000, 1), (8192, 4))
_SETTINGS = (STOCK, Setting(DIRECT, 3, source=DRAFT), Setting(LEVELS, 6, 2, 1024, DRAFT))
# As many as lie between two selections, so that one is among them.
_STEPS = 8
# Steps at the beginning that are not timed: the first selection is in them.
_WARM_UP = 2


def measure_passes(path: Path, quick: bool = False) -> str:
    """Writes what steps took, after each engine.

    Args:
        quick: the tiny model alone, at short contexts.

    Returns:
        A line for each cell.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    found: dict = {"dtype": "float32", "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        (tiny,) = _measure(TINY, STOCK, ((512, 1),), Path(folder), quick)
        found["tiny"] = {
            "model": asdict(TINY),
            "context": 512,
            "step_ms": tiny["step_ms"],
            "machine": tiny["machine"],
        }
        for model in (TINY,) if quick else MODELS:
            for setting in _SETTINGS:
                cells = ((2048, 1), (2048, 2)) if quick else _CELLS
                found["cells"] += _measure(model, setting, cells, Path(folder), quick)
                path.write_text(json.dumps(found, indent=1) + "\n")
    return "\n".join(
        f"{c['model']['name']} {c['context']} x {c['batch']} {Setting(**c['setting'])}: "
        f"{c['step_ms']:.1f} ms"
        for c in found["cells"]
    )


def _measure(model: Geometry, setting: Setting, cells, folder: Path, quick: bool) -> list[dict]:
    from vllm import LLM

    keys: dict = {}
    if setting.route != PLAIN:
        keys = {
            "method": "triforce",
            "model": _written(draft_of(model), folder),
            "num_speculative_tokens": setting.num_tokens,
            "adaptive": False,
            "min_context": 0,
        }
        if setting.route == LEVELS:
            keys |= {"gamma": setting.gamma, "retrieval_budget": setting.budget}
        else:
            keys |= {"levels": "1,3"}
    longest = max(context for context, _ in cells) + 512
    tokens = max(context * batch for context, batch in cells) + 4096
    llm = LLM(
        _written(model, folder),
        speculative_config=keys or None,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=longest,
        max_num_seqs=max(batch for _, batch in cells),
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=tokens * model.kv_bytes_per_token,
        kv_transfer_config={
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_std": 0.01},
        },
    )
    found, scale = [], 0.02 if quick else 1.0
    before = machine_now(scale)
    for context, batch in cells:
        cell = _cell(llm, model, setting, context, batch)
        after = machine_now(scale)
        found.append(cell | {"machine": asdict(between(before, after))})
        before = after
    del llm
    gc.collect()
    return found


def _cell(llm, model: Geometry, setting: Setting, context: int, batch: int) -> dict:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    most = (_WARM_UP + _STEPS + 2) * (setting.num_tokens + 1)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=most,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    names = [f"{setting}-{context}-{batch}-{number}" for number in range(batch)]
    for number, name in enumerate(names):
        prompt = [3 + (number + place) % (model.vocab - 3) for place in range(context)]
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step()}
    for _ in range(_WARM_UP):
        engine.step()
    before, num_tokens, start = _counters(llm), 0, time.perf_counter()
    for _ in range(_STEPS):
        num_tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    seconds = time.perf_counter() - start
    after = _counters(llm)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    cell = {
        "model": asdict(model),
        "context": context,
        "batch": batch,
        "setting": asdict(setting),
        "step_ms": 1e3 * seconds / _STEPS,
        "tokens": num_tokens / batch / _STEPS,
    }
    if before is None or after is None:
        return cell
    spent = after.since(before)
    parts = {part: 1e3 * of / _STEPS for part, of in spent.time_seconds.items()}
    return cell | {
        "parts_ms": parts,
        "rounds": spent.num_level2_passes / _STEPS,
        "level1_steps": spent.num_level1_drafted / batch / _STEPS
        if setting.route == LEVELS
        else setting.num_tokens,
    }


def _counters(llm):
    from vllm_triforce.metrics.report import counters_of

    try:
        return counters_of(llm)
    except ValueError:
        return None


def _written(model: Geometry, folder: Path) -> str:
    """A folder with the model's config.json and nothing else."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.is_tied,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    place = folder / f"{model.name}-{model.vocab}"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)
