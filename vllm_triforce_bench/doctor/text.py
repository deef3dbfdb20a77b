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

Rows = Iterator[tuple[str | None, str]]
"""Names and values; a name of None is a paragraph."""


def text(results: dict[str, Any]) -> str:
    rows = _server(results) if "url" in results else _examined(results)
    return "\n".join(_line(name, value) for name, value in rows)


def _line(name: str | None, value: str) -> str:
    """Format a name and its value, a long value wrapped below itself, unless it is a command."""
    indent = 0 if name is None else _INDENT
    if name == "choose":
        return f"{name:<{indent}}{value}"
    return textwrap.fill(
        f"{name or '':<{indent}}{value}",
        _WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _examined(results: dict[str, Any]) -> Rows:
    yield from _installation(results["installation"], lists_wraps="engine" not in results)
    if "engine" in results:
        yield None, ""
        yield from _engine(results["engine"])
    if "layers" in results:
        yield from _layers(results["layers"])
    if "memory" in results:
        yield from _memory(results["memory"], results["engine"])
    if "prediction" in results:
        yield from _prediction(results["prediction"])
    yield None, ""
    yield None, verdict(results)


def _installation(results: dict[str, Any], lists_wraps: bool) -> Rows:
    yield "vllm-triforce", results["vllm_triforce"]
    if results["vllm"] is None:
        return
    support = "supported" if results["is_supported"] else "not supported"
    yield "vLLM", f"{results['vllm']} ({support}: {results['supported_vllm']})"
    libraries = ", ".join(f"{name} {results[name]}" for name in LIBRARIES if name in results)
    yield "Python", f"{results['python']}; {libraries}"
    if "platform" in results:
        yield "platform", ", ".join(filter(None, (results["platform"], results.get("device"))))
    if "wraps" in results:
        num_wraps = len(results["wraps"])
        yield "wraps of vLLM", f"{num_wraps} functions, inert unless TriForce is asked for"
        for patch in results["wraps"] if lists_wraps else ():
            yield "", f"{patch['what']}: {patch['why']}"


def _engine(results: dict[str, Any]) -> Rows:
    yield "model", results["model"]
    if results["refusal"] is not None:
        yield "refused by", results["refused_by"]
        yield "because", results["refusal"]
        return
    scheduling = "asynchronous" if results["asynchronous"] else "synchronous"
    yield "model runner", f"{results['runner']}, {scheduling} scheduling"
    settings = results["settings"]
    if results["is_plain"]:
        yield "levels", "3: plain decoding over host memory"
    else:
        draft = results["draft"] or "no draft model"
        yield "level 1", f"{settings['draft_sources'].replace(',', ', ')} ({draft})"
        config = ResolvedConfig(**settings)
        level2 = f"{config.selection}, {config.budget_text} in chunks of {config.block_size}"
        if not config.uses_level2:
            level2 = f"takes no part: {results['no_level2'] or 'levels=' + config.levels}"
        yield "level 2", level2
        lengths = []
        for name, choice in _LENGTHS.items():
            if choice not in results["chosen_while_running"]:
                lengths.append(f"{name} {settings[name]}")
            else:
                limit = "" if choice == "context" else f", at most {settings[name]}"
                lengths.append(f"{name} chosen while running{limit}")
        yield "lengths", "; ".join(lengths)
    if settings["kv_offload_gib"] is not None:
        yield "KV in host memory", f"{settings['kv_offload_gib']:g} GiB a rank"
    for warning in results["warnings"]:
        yield "warning", warning


def _layers(results: dict[str, Any]) -> Rows:
    if "error" in results:
        yield "layers", f"cannot be told without weights: {results['error']}"
        return
    retrieve, dense = results["retrieve"], results["dense"]
    yield "attention backend", results["attention_backend"]
    yield "layers", f"{len(retrieve)} of {len(retrieve) + len(dense)} retrieve"
    for reason, count in Counter(dense.values()).items():
        yield "", f"{count} stay dense: {reason}"


def _memory(results: dict[str, Any], engine: dict[str, Any]) -> Rows:
    of = " of each rank" if results["ranks"] > 1 else ""
    yield "weights", f"{_size(results['weight_bytes'])}{of}"
    if num_bytes := results["level2_model_bytes"]:
        yield "level 2's model", f"{_size(num_bytes)}{of}, beside the weights"
    kv, longest = results["kv_bytes_per_token"], engine["max_model_len"]
    total = _size(kv * longest)
    yield "KV cache", f"{kv / 1024:g} KiB a token, {total} for {longest:,} tokens{of}"
    share = f"{results['triforce_share_of_kv']:.1%} of the KV cache"
    yield "beside them", f"{_size(results['triforce_bytes'])} and {share}{of}, for TriForce"
    if "device_bytes" in results:
        room = f"room for about {results['device_kv_tokens']:,} tokens of KV cache"
        yield "device", f"{_size(results['device_bytes'])}, {room}{of}"


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
    )


def _prediction(results: dict[str, Any]) -> Rows:
    if "not_predicted" in results:
        yield "prediction", f"none: {results['not_predicted']}"
        return
    assumed = results["assumed"]
    here = " (what is above is of the machine here)" if results["is_asked_for"] else ""
    acceptances = list(dict.fromkeys(cell["acceptance"] for cell in results["cells"]))
    yield None, ""
    yield (
        None,
        f"Predicted for {results['machine']}{here}, nothing of it measured. A route pays from the "
        "tokens a step in its column, accepted ones and the bonus token, which take the acceptance "
        "in brackets. Gains are decode speed over plain decoding at an acceptance of level 2; "
        f"level 1's is assumed: {assumed['draft_acceptance']:g} for a draft, "
        f"{assumed['lookup_acceptance']:g} for prompt lookup.",
    )
    gains = {
        (cell["batch"], at["context"], cell["acceptance"]): at
        for cell in results["cells"]
        for at in cell["contexts"]
    }
    points = results["break_even"]
    if not points:
        yield "", "does not fit this machine's memory"
        return
    routes = list(points[0]["routes"])
    heads = [f"{_ROUTES[route]:<16}" for route in routes]
    heads += [f"gain at {acceptance:g} " for acceptance in acceptances]
    yield "requests x tokens", "".join(heads)
    for batch in dict.fromkeys(point["batch"] for point in points):
        of_batch = [point for point in points if point["batch"] == batch]
        # The longest context, a quarter and a sixteenth of it.
        for point in of_batch[-1::-2][:3][::-1]:
            cells = []
            for route in routes:
                pays = point["routes"][route]
                since = pays and f"{pays['tokens']:.2f} ({pays['acceptance']:.2f})"
                cells.append(f"{since or 'never':<16}")
            for acceptance in acceptances:
                at = gains[batch, point["context"], acceptance]
                gain = "plain" if at["setting"] == "plain" else f"{at['speedup']:.2f}x"
                cells.append(f"{gain:<12}")
            yield f"{batch} x {point['context']:,}", "".join(cells)
    if "choice" in results:
        yield None, ""
        choice = results["choice"]
        yield "choose", choice["command"]
        place = f"at 1 x {choice['context']:,} and {choice['acceptance']:g}"
        if not choice["keys"]:
            yield "", f"{choice['speedup']:.2f}x {place}; no key is predicted to add 5 %"
        for key in choice["keys"]:
            what = f"{key['from']:.2f}x -> {key['to']:.2f}x {place}"
            if key["key"] == "model":
                what += (
                    f", by an EAGLE-3 head of this target with {choice['head_acceptance']:g} of "
                    "its tokens accepted by level 2; none is named here"
                )
            yield f"  {key['key']}", what


_ROUTES = {"lookup": "prompt lookup", "draft": "draft or head", "levels": "levels 1 and 2"}


def verdict(results: dict[str, Any]) -> str:
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


def _server(results: dict[str, Any]) -> Rows:
    seconds = results["seconds"]
    period = f"{seconds:g} seconds" if seconds else "all since its start"
    yield "server", f"{results['url']}, {period}"
    for model in results["models"]:
        yield None, ""
        yield "model", model["model"]
        requests = f"{model['running']:.0f} running, {model['waiting']:.0f} waiting"
        yield "requests", f"{requests}; {model['kv_cache_usage']:.0%} of the KV cache used"
        if (length := model["mean_prompt_tokens"]) is not None:
            yield "prompts", f"{length:,.0f} tokens in the mean"
        yield "generated", f"{model['generated_tokens']:,.0f} tokens"
        if model["levels"] is not None:
            yield from _levels(model, model["levels"])
        for advice in model["advice"] or ["nothing to change"]:
            yield "advice", advice


def _levels(model: dict[str, Any], levels: dict[str, Any]) -> Rows:
    yield "speculation", f"{model['accepted_share']:.0%} of these were proposed and accepted"
    if not levels["num_proposals"]:
        return
    has = f"has {levels['mean_acceptance_length']:.2f} tokens a step"
    needs = "what it needs was not measured"
    if levels["break_even_tokens"] is not None:
        needs = f"needs {levels['break_even_tokens']:.2f} here to pay"
    yield "break-even", f"speculation {has}, and {needs}"
    direct = levels["num_direct_proposals"] / levels["num_proposals"]
    length = levels["num_proposed"] / levels["num_proposals"]
    yield "proposals", f"{length:.1f} tokens each; {direct:.0%} straight to the full pass"
    accepted = levels["num_level2_accepted"]
    tested = accepted + levels["num_level3_rejections"]
    share = f"{levels['level2_acceptance_per_test']:.3f} of the tokens it tests"
    yield "full pass", f"accepts {share} ({accepted:,} of {tested:,})"
    if drafted := levels["num_level1_drafted"]:
        share = f"{levels['level1_acceptance_rate']:.3f} of level 1's tokens"
        yield "level 2", f"accepts {share} ({levels['num_level1_accepted']:,} of {drafted:,})"
    seconds = levels["time_seconds"]
    parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
    yield "proposing", f"{sum(seconds.values()):.1f} s ({parts})"
