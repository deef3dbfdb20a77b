"""The doctor's results as lines for a terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm_triforce.config import ResolvedConfig
from vllm_triforce_bench.doctor.installation import LIBRARIES

_GIB = 2**30
_INDENT, _WIDTH = 20, 100
# Keys, and the controller's names of their choice.
_LENGTHS = {"num_speculative_tokens": "length", "gamma": "gamma", "min_context": "context"}


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Print the results of ``examine()``."""
    yield from _installation(results["installation"], lists_wraps="engine" not in results)
    if "engine" in results:
        yield ""
        yield from _engine(results["engine"])
    if "layers" in results:
        yield from _layers(results["layers"])
    if "memory" in results:
        yield from _memory(results["memory"], results["engine"])
    if "prediction" in results:
        yield from _prediction(results["prediction"])
    yield ""
    yield _verdict(results)


def line(name: str, value: str) -> str:
    """Format a name and its value, a long value wrapped below itself."""
    return textwrap.fill(
        f"{name:<{_INDENT}}{value}",
        _WIDTH,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _installation(results: dict[str, Any], lists_wraps: bool) -> Iterator[str]:
    yield line("vllm-triforce", results["vllm_triforce"])
    if results["vllm"] is None:
        return
    support = "supported" if results["is_supported"] else "not supported"
    yield line("vLLM", f"{results['vllm']} ({support}: {results['supported_vllm']})")
    libraries = ", ".join(f"{name} {results[name]}" for name in LIBRARIES if name in results)
    yield line("Python", f"{results['python']}; {libraries}")
    if "platform" in results:
        device = f", {results['device']}" if "device" in results else ""
        yield line("platform", f"{results['platform']}{device}")
    if "wraps" in results:
        names = [patch["what"] for patch in results["wraps"]]
        yield line("wraps of vLLM", f"{len(names)} functions, inert unless TriForce is asked for")
        for patch in results["wraps"] if lists_wraps else ():
            yield line("", f"{patch['what']}: {patch['why']}")


def _engine(results: dict[str, Any]) -> Iterator[str]:
    yield line("model", results["model"])
    if results["refusal"] is not None:
        yield line("refused by", results["refused_by"])
        yield line("because", results["refusal"])
        return
    scheduling = "asynchronous" if results["asynchronous"] else "synchronous"
    yield line("model runner", f"{results['runner']}, {scheduling} scheduling")
    settings = results["settings"]
    if results["is_plain"]:
        yield line("levels", "3: plain decoding over host memory")
    else:
        yield from _speculation(results, settings)
    if settings["kv_offload_gib"] is not None:
        yield line("KV in host memory", f"{settings['kv_offload_gib']:g} GiB a rank")
    for warning in results["warnings"]:
        yield line("warning", warning)


def _speculation(results: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    draft = results["draft"] or "no draft model"
    yield line("level 1", f"{settings['draft_sources'].replace(',', ', ')} ({draft})")
    policy, block = settings["selection"], settings["block_size"]
    budget = ResolvedConfig.from_dict(settings).budget_text
    yield line("level 2", f"{policy}, {budget} in chunks of {block}")
    lengths = []
    for name, choice in _LENGTHS.items():
        if choice not in results["chosen_while_running"]:
            lengths.append(f"{name} {settings[name]}")
        elif choice == "context":
            lengths.append(f"{name} chosen while running")
        else:
            lengths.append(f"{name} chosen while running, at most {settings[name]}")
    yield line("lengths", "; ".join(lengths))


def _layers(results: dict[str, Any]) -> Iterator[str]:
    if "error" in results:
        yield line("layers", f"cannot be told without weights: {results['error']}")
        return
    retrieve, dense = results["retrieve"], results["dense"]
    yield line("attention backend", results["attention_backend"])
    yield line("layers", f"{len(retrieve)} of {len(retrieve) + len(dense)} retrieve")
    for reason, count in Counter(dense.values()).items():
        yield line("", f"{count} stay dense: {reason}")


def _memory(results: dict[str, Any], engine: dict[str, Any]) -> Iterator[str]:
    of = " of each rank" if results["ranks"] > 1 else ""
    yield line("weights", f"{_size(results['weight_bytes'])}{of}")
    if num_bytes := results["level2_model_bytes"]:
        yield line("level 2's model", f"{_size(num_bytes)}{of}, beside the weights")
    kv, longest = results["kv_bytes_per_token"], engine["max_model_len"]
    total = _size(kv * longest)
    yield line("KV cache", f"{kv / 1024:g} KiB a token, {total} for {longest:,} tokens{of}")
    share = f"{results['triforce_share_of_kv']:.1%} of the KV cache"
    yield line("beside them", f"{_size(results['triforce_bytes'])} and {share}{of}, for TriForce")
    if "device_bytes" in results:
        room = f"room for about {results['device_kv_tokens']:,} tokens of KV cache"
        yield line("device", f"{_size(results['device_bytes'])}, {room}{of}")


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
    )


def _prediction(results: dict[str, Any]) -> Iterator[str]:
    if "not_predicted" in results:
        yield line("prediction", f"none: {results['not_predicted']}")
        return
    assumed = results["assumed"]
    yield ""
    here = " (what is above is of the machine here)" if results.get("is_asked_for") else ""
    yield textwrap.fill(
        f"Predicted for {results['machine']}{here}, nothing of it measured: decode speed over "
        f"plain decoding, by the acceptance of level 2's tokens; level 1's taken to be "
        f"{assumed['draft_acceptance']:g} for a draft, {assumed['lookup_acceptance']:g} for prompt "
        "lookup.",
        _WIDTH,
    )
    for cell in results["cells"]:
        yield _cell(cell)


def _cell(cell: dict[str, Any]) -> str:
    name = f"{cell['batch']} x, at {cell['acceptance']:g}"
    if not cell["contexts"]:
        return line(name, "does not fit this machine's memory")
    pays_from = cell["pays_from"]
    start = "plain at every length" if pays_from is None else f"pays from {pays_from:,} tokens"
    gains = [at for at in cell["contexts"] if at["setting"] != "plain"]
    longest = ", ".join(f"{at['speedup']:.2f}x at {at['context']:,}" for at in gains[-3:])
    return line(name, f"{start}{': ' if longest else ''}{longest}")


def _verdict(results: dict[str, Any]) -> str:
    if (refusal := results["installation"]["refusal"]) is not None:
        return f"TriForce is not available: {refusal}."
    if "engine" not in results:
        return "TriForce is there to be asked for. Name a model to see what it would do with it."
    engine = results["engine"]
    if engine["refusal"] is not None:
        if engine["refused_by"] == "vLLM":
            return "Stock vLLM refuses this as well: mend that first."
        return "TriForce would refuse to start; without it, vLLM takes the other options."
    if results["runs"] is None:
        return "It cannot be told without weights whether TriForce would run."
    if not results["runs"]:
        return f"TriForce would refuse to start: {results['layers']['refusal']}."
    cells = results.get("prediction", {}).get("cells", [])
    if cells and all(cell["pays_from"] is None for cell in cells):
        return "TriForce would run, and by this prediction decode plainly, as stock vLLM does."
    return "TriForce would run."
