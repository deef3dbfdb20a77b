"""What was found, as lines for a terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

_GIB = 2**30
_INDENT, _WIDTH = 20, 100
# The key, and what the controller calls its choice.
_LENGTHS = {"num_speculative_tokens": "length", "gamma": "gamma", "min_context": "context"}
_LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "xformers")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """
    Args:
        found: of ``examine()``.
    """
    yield from _installation(found["installation"], lists_wraps="engine" not in found)
    if "engine" in found:
        yield ""
        yield from _engine(found["engine"])
    if "layers" in found:
        yield from _layers(found["layers"])
    if "memory" in found:
        yield from _memory(found["memory"], found["engine"])
    if "prediction" in found:
        yield from _prediction(found["prediction"])
    yield ""
    yield _verdict(found)


def _line(name: str, value: str) -> str:
    """A name and its value, which goes on below itself where it is long."""
    return textwrap.fill(
        f"{name:<{_INDENT}}{value}",
        _WIDTH,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _installation(found: dict[str, Any], lists_wraps: bool) -> Iterator[str]:
    yield _line("vllm-triforce", found["vllm_triforce"])
    if found["vllm"] is None:
        return
    known = "supported" if found["is_supported"] else "not supported"
    yield _line("vLLM", f"{found['vllm']} ({known}: {found['supported_vllm']})")
    with_them = ", ".join(f"{name} {found[name]}" for name in _LIBRARIES if name in found)
    yield _line("Python", f"{found['python']}; {with_them}")
    if "platform" in found:
        device = f", {found['device']}" if "device" in found else ""
        yield _line("platform", f"{found['platform']}{device}")
    if "wraps" in found:
        names = [patch["what"] for patch in found["wraps"]]
        yield _line("wraps of vLLM", f"{len(names)} functions, inert unless TriForce is asked for")
        for patch in found["wraps"] if lists_wraps else ():
            yield _line("", f"{patch['what']}: {patch['why']}")


def _engine(found: dict[str, Any]) -> Iterator[str]:
    yield _line("model", found["model"])
    if found["refusal"] is not None:
        yield _line("refused by", found["refused_by"])
        yield _line("because", found["refusal"])
        return
    scheduling = "asynchronous" if found["asynchronous"] else "synchronous"
    yield _line("model runner", f"{found['runner']}, {scheduling} scheduling")
    settings = found["settings"]
    if found["is_plain"]:
        yield _line("levels", "3: plain decoding over host memory")
    else:
        yield from _speculation(found, settings)
    if settings["kv_offload_gib"] is not None:
        yield _line("KV in host memory", f"{settings['kv_offload_gib']:g} GiB a rank")
    for warning in found["warnings"]:
        yield _line("warning", warning)


def _speculation(found: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    draft = found["draft"] or "no draft model"
    yield _line("level 1", f"{settings['draft_sources'].replace(',', ', ')} ({draft})")
    budget, block = settings["retrieval_budget"], settings["block_size"]
    policy = settings["selection"]
    yield _line("level 2", f"{policy}, {budget:,} tokens in chunks of {block}")
    lengths = []
    for name, choice in _LENGTHS.items():
        if choice not in found["chosen_while_running"]:
            lengths.append(f"{name} {settings[name]}")
        elif choice == "context":
            lengths.append(f"{name} chosen while running")
        else:
            lengths.append(f"{name} chosen while running, at most {settings[name]}")
    yield _line("lengths", "; ".join(lengths))


def _layers(found: dict[str, Any]) -> Iterator[str]:
    if "error" in found:
        yield _line("layers", f"cannot be told without weights: {found['error']}")
        return
    retrieve, dense = found["retrieve"], found["dense"]
    yield _line("attention backend", found["attention_backend"])
    yield _line("layers", f"{len(retrieve)} of {len(retrieve) + len(dense)} retrieve")
    for why, count in Counter(dense.values()).items():
        yield _line("", f"{count} stay dense: {why}")


def _memory(found: dict[str, Any], engine: dict[str, Any]) -> Iterator[str]:
    of = " of each rank" if found["ranks"] > 1 else ""
    yield _line("weights", f"{_size(found['weight_bytes'])}{of}")
    kv, longest = found["kv_bytes_per_token"], engine["max_model_len"]
    whole = _size(kv * longest)
    yield _line("KV cache", f"{kv / 1024:g} KiB a token, {whole} for {longest:,} tokens{of}")
    more = f"and {found['triforce_share_of_kv']:.1%} of the KV cache"
    yield _line("beside them", f"{_size(found['triforce_bytes'])} {more}{of}, for TriForce")
    if "device_bytes" in found:
        room = f"room for about {found['device_kv_tokens']:,} tokens of KV cache"
        yield _line("device", f"{_size(found['device_bytes'])}, {room}{of}")


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
    )


def _prediction(found: dict[str, Any]) -> Iterator[str]:
    if "not_predicted" in found:
        yield _line("prediction", f"none: {found['not_predicted']}")
        return
    assumed = found["assumed"]
    yield ""
    here = " (what is above is of the machine here)" if found.get("is_asked_for") else ""
    yield textwrap.fill(
        f"Predicted for {found['machine']}{here}, nothing of it measured: decode speed over plain "
        f"decoding, by the acceptance of level 2's tokens; level 1's taken to be "
        f"{assumed['draft_acceptance']:g} for a draft, {assumed['lookup_acceptance']:g} for prompt "
        "lookup.",
        _WIDTH,
    )
    for cell in found["cells"]:
        yield _cell(cell)


def _cell(cell: dict[str, Any]) -> str:
    name = f"{cell['batch']} x, at {cell['acceptance']:g}"
    if not cell["contexts"]:
        return _line(name, "does not fit this machine's memory")
    since = cell["pays_from"]
    start = "plain at every length" if since is None else f"pays from {since:,} tokens"
    ends = [at for at in cell["contexts"] if at["setting"] != "plain"]
    shown = ", ".join(f"{at['speedup']:.2f}x at {at['context']:,}" for at in ends[-3:])
    return _line(name, f"{start}{': ' if shown else ''}{shown}")


def _verdict(found: dict[str, Any]) -> str:
    if (refusal := found["installation"]["refusal"]) is not None:
        return f"TriForce is not available: {refusal}."
    if "engine" not in found:
        return "TriForce is there to be asked for. Name a model to see what it would do with it."
    engine = found["engine"]
    if engine["refusal"] is not None:
        if engine["refused_by"] == "vLLM":
            return "Stock vLLM refuses this as well: mend that first."
        return "TriForce would refuse to start; without it, vLLM takes the other options."
    if found["runs"] is None:
        return "It cannot be told without weights whether TriForce would run."
    if not found["runs"]:
        return f"TriForce would refuse to start: {found['layers']['refusal']}."
    cells = found.get("prediction", {}).get("cells", [])
    if cells and all(cell["pays_from"] is None for cell in cells):
        return "TriForce would run, and by this prediction decode plainly, as stock vLLM does."
    return "TriForce would run."
