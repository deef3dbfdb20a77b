"""Count launches, uploads, waits and bytes read in a step of Runner V2 on a GPU.

Run it in vLLM's CUDA build, on a GPU or under the emulation (``make emulated-gpu``). CUDA graphs
are off, so that every launch is counted. With graphs, a model's pass, and the captured part of a
round, would be one launch each. Launches outside of them cost as counted.

    python tools/step_counts.py [--out counts.json] [CASE ...]

A launch is an operator of PyTorch or vLLM that computes, or a Triton kernel. Bytes are those of
weight matrices and of the keys and values that FlashAttention reads.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.utils import torch_utils

from vllm_triforce.metrics.counters import PartTimes

MAX_MODEL_LEN = 1024
CONTEXT = 512
COUNTED_STEPS = 8  # refresh_interval, so that one selection is among them
BATCHES = (1, 8)
TOKENS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "masked": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},  # default of many models
    "shaped": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05},
}
_WARM_STEPS = 4
_NO_WORK = {
    "aten::_local_scalar_dense",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::set_",
    "_C_cache_ops::get_kv_cache_shape",
}
_WAITS = {"item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__index__", "nonzero"}

TRIFORCE = {"method": "triforce", "adaptive": False, "min_context": 64, "retrieval_budget": 256}
LOOKUP = {**TRIFORCE, "num_speculative_tokens": 6}
CASES: dict[str, dict | None] = {
    "stock": None,
    "waiting": {**LOOKUP, "min_context": 1000},
    "lookup, straight": {**LOOKUP, "levels": "1,3"},
    "draft, straight": {**LOOKUP, "levels": "1,3", "model": "draft"},
    "lookup, levels": LOOKUP,
    "draft, levels": {**LOOKUP, "model": "draft"},
    "level 2 by itself": {**LOOKUP, "levels": "2,3"},
}


class Counts:
    """Counts by region; nested regions count for the innermost."""

    def __init__(self) -> None:
        self.regions = ["step"]
        self.is_on = False
        self.by_region: dict[str, Counter[str]] = defaultdict(Counter)
        self.names: dict[str, Counter[str]] = defaultdict(Counter)

    def reset(self) -> None:
        self.by_region.clear()
        self.names.clear()

    def add(self, kind: str, number: int = 1, name: str = "") -> None:
        if not self.is_on:
            return
        self.by_region[self.regions[-1]][kind] += number
        if name:
            self.names[f"{self.regions[-1]}: {kind}"][name] += number

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        self.regions.append(name)
        try:
            yield
        finally:
            self.regions.pop()


COUNTS = Counts()


class Operators(TorchDispatchMode):
    """Counts launches of operators, and the bytes that they read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        is_view = any(
            a.alias_info is not None and not a.alias_info.is_write for a in schema.returns
        ) or getattr(func, "is_view", False)
        if not is_view and schema.name not in _NO_WORK and not schema.name.startswith("vllm::"):
            COUNTS.add("launches", 1, schema.name)
            if schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"):
                matrices = [a for a in args if isinstance(a, torch.Tensor)]
                COUNTS.add("weight bytes", max(a.numel() * a.element_size() for a in matrices))
            if schema.name == "_vllm_fa3_C::fwd":
                named = {a.name: v for a, v in zip(schema.arguments, args)} | (kwargs or {})
                COUNTS.add("KV bytes", _attention_bytes(named))
        return func(*args, **(kwargs or {}))


def _attention_bytes(named: dict) -> int:
    keys, lengths = named["k"], named["seqused_k"]
    return 2 * int(lengths.sum()) * keys.shape[-2] * keys.shape[-1] * keys.element_size()


class Transfers(TorchFunctionMode):
    """Counts uploads, and calls from the package that may wait for the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.to and _is_gpu(*args[1:], kwargs.get("device")):
            with uploading():
                return func(*args, **kwargs)
        if name in _WAITS and (site := _site(package_only=True)):
            COUNTS.add("perhaps waits", 1, f"{name} at {site}")
        return func(*args, **kwargs)


def _is_gpu(*values) -> bool:
    return any(str(v).startswith("cuda") for v in values if isinstance(v, str | torch.device))


@contextmanager
def uploading() -> Iterator[None]:
    """Count one upload; operators within it are not counted."""
    COUNTS.add("uploads", 1, _site())
    before, COUNTS.is_on = COUNTS.is_on, False
    try:
        yield
    finally:
        COUNTS.is_on = before


def count_uploads() -> None:
    """Count calls of vLLM's ``async_tensor_h2d`` in every module that imported it."""
    upload = torch_utils.async_tensor_h2d

    def counted(*args, **kwargs):
        with uploading():
            return upload(*args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "async_tensor_h2d", None) is upload:
            module.async_tensor_h2d = counted


def _site(package_only: bool = False) -> str:
    """Return the innermost line of vLLM or of the package in the stack.

    Args:
        package_only: returns "" if that line is not in the package.
    """
    for frame in reversed(traceback.extract_stack(limit=14)[:-2]):
        if "vllm" in frame.filename and "step_counts" not in frame.filename:
            if package_only and "vllm_triforce" not in frame.filename:
                return ""
            path = frame.filename.split("vllm", 1)[1].split("site-packages/", 1)[-1]
            return f"{path}:{frame.lineno}"
    return ""


def count_triton() -> None:
    launch = triton.runtime.jit.JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if not warmup:
            COUNTS.add("launches", 1, self.fn.__name__)
        # The emulation's operators that interpret a kernel are not the GPU's work.
        before, COUNTS.is_on = COUNTS.is_on, False
        try:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            COUNTS.is_on = before

    triton.runtime.jit.JITFunction.run = run


def with_operators_counted(function):
    def call(*args, **kwargs):
        if not COUNTS.is_on:
            return function(*args, **kwargs)
        with Operators():
            return function(*args, **kwargs)

    return call


def mark_regions(runner) -> None:
    """Mark the passes of models and the parts of a proposal as regions."""

    def within(owner, attribute: str, name, is_pass: bool = False) -> None:
        original = getattr(owner, attribute)

        def call(*args, **kwargs):
            title = name(*args) if callable(name) else name
            if is_pass:
                if COUNTS.regions[-1].startswith("pass"):
                    return original(*args, **kwargs)
                COUNTS.add("passes", 1, title)
            with COUNTS.region(title):
                return original(*args, **kwargs)

        setattr(owner, attribute, call)

    within(runner.model, "forward", "pass: full", is_pass=True)
    for layer in runner.compilation_config.static_forward_context.values():
        # vLLM wraps attention in an operator, which hides its launches from the mode outside.
        layer.impl.forward = with_operators_counted(layer.impl.forward)
    speculator = runner.speculator
    if speculator is None:
        return
    from vllm_triforce.runner_v2.passes import GraphedRound, ModelPass

    within(speculator, "propose", "propose")
    within(speculator.recorder, "record", "recorder")
    within(GraphedRound, "__call__", lambda work, _: f"pass: {work.name}", is_pass=True)
    within(ModelPass, "run", lambda model_pass, _: f"pass: {model_pass.name}", is_pass=True)
    part = PartTimes.part

    @contextmanager
    def marked(times, name):
        with COUNTS.region(f"propose: {name}"), part(times, name):
            yield

    PartTimes.part = marked


def save_models(folder: str) -> tuple[str, str]:
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_MODEL_LEN,
            initializer_range=0.08,
        )
    )
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.005 * torch.randn_like(weight))
    target.save_pretrained(f"{folder}/target")
    draft.save_pretrained(f"{folder}/draft")
    return f"{folder}/target", f"{folder}/draft"


def count_case(case: str, folder: str) -> list[dict]:
    """Count the steps of one engine, for all batch sizes and sampling parameters."""
    settings = copy.deepcopy(CASES[case])
    if settings and "model" in settings:
        settings["model"] = f"{folder}/draft"
    llm = LLM(
        model=f"{folder}/target",
        dtype="bfloat16",
        attention_backend="FLASH_ATTN",
        speculative_config=settings,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        num_gpu_blocks_override=1024,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    count_uploads()
    engine = llm.llm_engine
    mark_regions(engine.model_executor.driver_worker.worker.model_runner)
    return [
        {"case": case, "batch": batch, "tokens": tokens, **count(engine, batch, tokens)}
        for tokens in TOKENS
        for batch in BATCHES
    ]


def count(engine, batch: int, tokens: str) -> dict:
    """Count per step while all requests decode, as a mean over ``COUNTED_STEPS``."""
    COUNTS.reset()
    sampling = SamplingParams(**TOKENS[tokens], max_tokens=300, ignore_eos=True, detokenize=False)
    names = [f"{batch} {tokens} {number}" for number in range(batch)]
    for number, name in enumerate(names):
        prompt = [1, *((7 * i + number) % 500 for i in range(CONTEXT))]
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    first_tokens = 0
    while first_tokens < batch:
        first_tokens += sum(bool(o.outputs[0].token_ids) for o in engine.step())
    for _ in range(_WARM_STEPS):
        engine.step()
    with Operators(), Transfers():
        COUNTS.is_on = True
        for _ in range(COUNTED_STEPS):
            engine.step()
        COUNTS.is_on = False
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "regions": {
            name: {kind: number / COUNTED_STEPS for kind, number in sorted(counts.items())}
            for name, counts in sorted(COUNTS.by_region.items())
        },
        "names": {
            key: {name: n / COUNTED_STEPS for name, n in names.most_common()}
            for key, names in sorted(COUNTS.names.items())
        },
    }


def table(results: list[dict]) -> str:
    """Return a Markdown table with a line for each case, batch size and sampling parameters."""
    lines = [
        "| case | batch | tokens | launches outside passes: vLLM's, TriForce's | uploads: vLLM's, "
        "TriForce's | passes (launches in each; MB read in each) |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        regions = result["regions"]
        triforce = [c for n, c in regions.items() if n.startswith(("propose", "recorder"))]
        vllm = regions["step"]
        passes = []
        for name, counts in regions.items():
            number = sum(c.get(name, 0) for c in result["names"].values())
            if name.startswith("pass") and number:
                num_bytes = counts.get("weight bytes", 0) + counts.get("KV bytes", 0)
                passes.append(
                    f"{number:g} x {name.removeprefix('pass: ')} "
                    f"({counts['launches'] / number:.0f}; {num_bytes / number / 1e6:.2f})"
                )
        lines.append(
            f"| {result['case']} | {result['batch']} | "
            f"{result['tokens']} | {vllm.get('launches', 0):.1f}, "
            f"{sum(c.get('launches', 0) for c in triforce):.1f} | {vllm.get('uploads', 0):.1f}, "
            f"{sum(c.get('uploads', 0) for c in triforce):.1f} | {'; '.join(passes)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--out", help="file for all counts, as JSON")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"{sorted(unknown)} are not cases; use some of {list(CASES)}")
    if os.environ.get("GPU_EMULATION"):  # Triton's interpreter cannot run vLLM's top-p kernel
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False
    count_triton()
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        save_models(folder)
        for case in args.cases or CASES:
            results += count_case(case, folder)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump(results, file, indent=1)
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
