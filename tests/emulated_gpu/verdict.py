"""What a case's result is held to."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.asked import shaped, target_logits
from tests.emulated_gpu.cases import Case
from tests.emulated_gpu.requests import REQUESTS, Request
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING

KINDS = tuple(sampling.kind for sampling in CAPTURED_SAMPLING)
# Roundings of a logit of about 4: where stock vLLM's token and another are closer in the exact
# logits, either may be taken.
TIE = {"bfloat16": 0.06, "float32": 1e-3}
# Tokens of a KV block of the target with gated delta nets, whose states are kept at its end.
STATE_BLOCK = 32
# Proposals that the full pass rejects at ties, where level 2 reads all of the context.
MAX_REJECTIONS = 3
# Kernel launches of a layer in level 2's graphs, and of a step's proposals outside graphs.
MAX_LAUNCHES = {"layer": 13, "layer that selects": 14, "step": 29}


@dataclass
class Verdict:
    """
    Args:
        faults: in words; none is a case that passed.
        result: as ``run_case.py`` wrote it; None where it did not.
        ties: of each greedy request that parted from stock vLLM's, how far the two tokens are apart
            in the logits.
    """

    case: Case
    seconds: float
    faults: list[str] = field(default_factory=list)
    result: dict | None = None
    ties: list[float] = field(default_factory=list)


def distance_where_parted(
    target: str, request: Request, wanted: list[int], found: list[int]
) -> float:
    """Of the two tokens' logits; infinite where one answer is the other's beginning."""
    place = next((i for i, (one, other) in enumerate(zip(wanted, found)) if one != other), None)
    if place is None:
        return math.inf
    new = wanted[: place + 1]
    logits = target_logits(target, request.prompt, new)
    logits = shaped(logits, request.prompt, new, request.params)[-1]
    return float(logits.max() - logits[[wanted[place], found[place]]].min())


def judge(verdict: Verdict, results: dict[Case, dict], target: str) -> None:
    """Add what is wrong with a result.

    Args:
        results: of the cases that came to an end.
    """
    case, result = verdict.case, verdict.result
    assert result is not None
    lengths = [len(tokens) for tokens in result["token_ids"]]
    asked = [request.max_tokens(case.num_tokens) for request in REQUESTS]
    if lengths != asked:
        verdict.faults.append(f"lengths {lengths}, not {asked}")
    for name, error in result["not_compiled"].items():
        verdict.faults.append(f"{name} does not compile for sm_90: {error}")
    for part, number in result["launches"].items():
        if number > MAX_LAUNCHES[part]:
            verdict.faults.append(f"{number} launches of a {part}, not {MAX_LAUNCHES[part]}")
    _judge_tokens(verdict, results, target)
    wanted = [(request.num_prompt_tokens - 1) // STATE_BLOCK * STATE_BLOCK for request in REQUESTS]
    if case.cached and result["num_cached"] != wanted:
        verdict.faults.append(f"{result['num_cached']} tokens of the cache, not {wanted}")
    if case.graphs:
        if result["graphs"][1] == 0:
            verdict.faults.append("no graph was replayed")
        wanted = _wanted_rounds(case) - set(result["replayed_rounds"])
        verdict.faults += [f"no {name} was replayed" for name in sorted(wanted)]
    if case.plan:
        verdict.faults += _counter_faults(case, result["counters"])


def _judge_tokens(verdict: Verdict, results: dict[Case, dict], target: str) -> None:
    """Greedy tokens are stock vLLM's, and those of a seed the same with and without graphs."""
    case, found = verdict.case, verdict.result["token_ids"]
    for other in [case.reference] + [case.eager] * case.graphs:
        if other not in results:
            verdict.faults.append(f"{other.name} has no result to compare with")
            continue
        for request, tokens, wanted in zip(REQUESTS, found, results[other]["token_ids"]):
            if tokens == wanted:
                continue
            fault = f"{request.name!r}: {tokens}, {other.name} there {wanted}"
            if other == case.reference and request.is_greedy:
                distance = distance_where_parted(target, request, wanted, tokens)
                if distance <= TIE[case.dtype]:
                    verdict.ties.append(distance)
                else:
                    verdict.faults.append(f"{fault}; {distance:.3g} from the best logit")
            if other == case.eager and "seed" in request.params:
                verdict.faults.append(fault)


def _wanted_rounds(case: Case) -> set[str]:
    """Name the rounds that are replayed: those of every kind of batch. Where one request at a time
    is speculated on, it may be that only greedy ones are; where prompt lookup alone drafts and the
    target has windows, or level 2 reads all of the context, that some kind has no drafts."""
    if not case.selection:  # prompt lookup by itself has no rounds that are captured
        return set()
    is_rare = case.target == "granite-windows" or case.reads_all
    kinds = ("greedy",) if case.is_single else () if is_rare else KINDS
    wanted = {"level 2 round"} | {f"level 2 logits, {kind}" for kind in kinds}
    if case.plan == "fixed":
        wanted.add("level 2 round without selection")
    if case.has_draft:
        wanted |= {f"level 1 round, {kind}" for kind in kinds}
    return wanted


def _counter_faults(case: Case, counters: dict[str, int]) -> Iterator[str]:
    """Or nothing was tested. Prompt lookup may find nothing to propose straight."""
    if case.offload and not counters["num_staged_bytes"]:
        yield "nothing was read of host memory"
    if case.plan == "plain":
        if counters["num_proposals"]:
            yield "something was proposed"
        return
    by_route = "num_level2_passes" if case.selection else "num_direct_proposals"
    wanted = {"num_level2_accepted", by_route}
    wanted |= set() if case.reads_all else {"num_level3_rejections"}
    if case.plan == "dice" and case.has_draft:
        wanted.add("num_direct_proposals")
    if case.reads_all and counters["num_level3_rejections"] > MAX_REJECTIONS:
        yield f"{counters['num_level3_rejections']} rejections, where level 2 reads all"
    yield from (f"{name} is 0" for name in sorted(wanted) if counters[name] == 0)
    for name in ("num_nan_requests", "num_boundary_faults"):
        if counters[name]:
            yield f"{name} is {counters[name]}"
