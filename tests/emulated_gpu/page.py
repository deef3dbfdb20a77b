"""The results as a page."""

import datetime
import importlib.metadata
import platform
import subprocess

from tests.emulated_gpu.requests import REQUESTS
from tests.emulated_gpu.verdict import Verdict
from tests.models import ROOT

_PACKAGES = ("vllm", "torch", "triton", "transformers", "numpy")

_HEAD = """# Emulated GPU, {date}

`make emulated-gpu{args}`, commit {commit}: {versions}.
vLLM's CUDA build on CPU tensors, Model Runner V2, asynchronous scheduling;
[gpu-emulation.md](../gpu-emulation.md) says what that shows and what it does not.
{kernels} Triton kernels, vLLM's and ours, were compiled for sm_90 and
interpreted{failed}.

A random Llama (2 layers, GQA 2, vocabulary of 512) and a draft that differs from it a little;
blocks of 16, a budget of 64 tokens. (*Windows*: a random Gemma 3 of 4 layers, of which every other
has a sliding window of 64 tokens.) Each case is an engine in a process of its own, which serves
these requests, four at a time (tokens at most: {tokens}):

{requests}

Greedy tokens are compared with stock vLLM's there, eager; a *tie* is a request that parts from it
where the target's logits in float32 leave both tokens possible by rounding. *Dice* draw anew in
each step what each request proposes, in the place of the controller. *Graphs* are stand-ins: what a
pass launches is recorded, and a replay launches the same on the same tensors. Tokens of the request
with a seed are compared with those of the same case without graphs. All lengths are checked.
Top-k and top-p are PyTorch's (`HAS_TRITON = False` in `vllm.v1.sample.ops.topk_topp_sampler`): the
interpreter is too slow for vLLM's kernel. Seconds are those of a shared machine.

| case | result | greedy | graphs, replays | level 2: passes, accepted | level 1 | straight | s |
|---|---|---|---|---|---|---|---|
"""


def line(verdict: Verdict) -> str:
    """Of one case, for people who wait."""
    result = verdict.result or {}
    said = "ok" if not verdict.faults else "FAILED: " + "; ".join(verdict.faults)
    parts = [f"{verdict.case.name}: {said}"]
    if result:
        parts.append(greedy(verdict))
        if verdict.case.graphs:
            parts.append("{} graphs, {} replays".format(*result["graphs"]))
        if counters := result["counters"]:
            parts.append(f"{counters['num_proposals']} proposals")
            parts.append(f"{counters['num_level2_passes']} passes of level 2")
    return ", ".join(parts) + f" ({verdict.seconds:.0f} s)"


def greedy(verdict: Verdict) -> str:
    """How the greedy requests compare with stock vLLM's."""
    if not verdict.num_compared:
        return "not compared"
    if verdict.num_parted:
        return f"{verdict.num_parted} not stock vLLM's"
    if verdict.ties:
        return f"identical but for {len(verdict.ties)} tie{'s' * (len(verdict.ties) > 1)}"
    return "identical"


def page(verdicts: list[Verdict], commit: str, pattern: str | None = None) -> str:
    """Markdown.

    Args:
        pattern: of ``--only``; None where all of a list were run.
    """
    results = [verdict.result for verdict in verdicts if verdict.result]
    kernels = {name for result in results for name in result["kernels"]}
    failed = {name for result in results for name in result["not_compiled"]}
    tokens = {verdict.case.backend: verdict.case.num_tokens for verdict in verdicts}
    head = _HEAD.format(
        date=f"{datetime.date.today():%-d %B %Y}",
        commit=commit,
        args=f""" ARGS="--only '{pattern}'\"""" if pattern else "",
        versions=", ".join(
            [f"Python {platform.python_version()}"]
            + [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
        ),
        kernels=len(kernels),
        failed=f", but for {', '.join(sorted(failed))}" if failed else "",
        requests="\n".join(
            f"- {request.num_prompt_tokens} tokens: {request.name}" for request in REQUESTS
        ),
        tokens=", ".join(f"{number} on {backend}" for backend, number in tokens.items()),
    )
    rows = "".join(_row(verdict) for verdict in verdicts)
    faults = [
        f"\n## {verdict.case.name}\n\n```\n" + "\n".join(verdict.faults) + "\n```\n"
        for verdict in verdicts
        if verdict.faults
    ]
    return head + rows + "".join(faults)


def _row(verdict: Verdict) -> str:
    cells = [verdict.case.name, "failed" if verdict.faults else "ok"]
    if result := verdict.result:
        cells += [greedy(verdict), "{}, {}".format(*result["graphs"])]
        if counters := result["counters"]:
            accepted = "{num_level2_accepted} of {num_level2_drafted}".format(**counters)
            cells += [
                f"{counters['num_level2_passes']}, {accepted}",
                "{num_level1_accepted} of {num_level1_drafted}".format(**counters),
                str(counters["num_direct_proposals"]),
            ]
    cells += [""] * (7 - len(cells))
    return "| " + " | ".join([*cells, f"{verdict.seconds:.0f}"]) + " |\n"


def current_commit() -> str:
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True)
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + " with changes" * bool(changed)
