"""What a case's result is held to."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.asked import penalized
from tests.emulated_gpu.cases import Case
from tests.emulated_gpu.requests import REQUESTS, Request
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING

KINDS = tuple(sampling.kind for sampling in CAPTURED_SAMPLING)
# Roundings of a logit of about 4: where stock vLLM's token and another are closer in the exact
# logits, either may be taken.
TIE = {"bfloat16": 0.06, "float32": 1e-3}
# Kernel launches of a layer in level 2's graphs, and of a step's proposals outside graphs.
MAX_LAUNCHES = {"layer": 13, "layer that selects": 14, "step": 29}


@dataclass
class Verdict:
    """
    Args:
        faults: in words; none is a case that passed.
        result: as ``run_case.py`` wrote it; None where it did not.
        num_compared: greedy requests that were compared with stock vLLM's.
        num_parted: greedy requests that parted from stock vLLM where it was no tie.
        ties: of each other one that parted, how far the two tokens are apart in the logits.
    """

    case: Case
    seconds: float
    faults: list[str] = field(default_factory=list)
    result: dict | None = None
    num_compared: int = 0
    num_parted: int = 0
    ties: list[float] = field(default_factory=list)


class Exact:
    """The target in transformers, float32."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._model = None

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the token that comes next, [vocab_size]."""
        if self._model is None:
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(self._target).float()
        return self._model(torch.tensor([token_ids])).logits[0, -1]


def distance_where_parted(
    request: Request, wanted: list[int], found: list[int], exact
) -> float | None:
    """Of the two tokens' logits; None where the tokens are the same, infinite where one of them is
    not even the best but for rounding."""
    if wanted == found:
        return None
    place = next((i for i, (one, other) in enumerate(zip(wanted, found)) if one != other), None)
    if place is None:
        return math.inf
    logits = exact.logits(request.prompt + wanted[:place])
    if any(name.endswith("_penalty") for name in request.params):
        of_all = logits.expand(place + 1, -1)  # of which the last place is asked for
        logits = penalized(of_all, request.prompt, wanted[: place + 1], request.params)[-1]
    return float(logits.max() - logits[[wanted[place], found[place]]].min())


def judge(verdict: Verdict, results: dict[Case, dict], exact: Exact) -> None:
    """Adds what is wrong with a result.

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
    _judge_greedy(verdict, result, results.get(case.reference), exact)
    if case.graphs:
        _judge_seeded(verdict, result, results.get(case.eager))
        if result["graphs"][1] == 0:
            verdict.faults.append("no graph was replayed")
        if case.selection:  # prompt lookup by itself has no rounds that are captured
            _judge_rounds(verdict, result["replayed_rounds"])
    for part, number in result["launches"].items():
        if number > MAX_LAUNCHES[part]:
            verdict.faults.append(
                f"{number} launches of a {part}, not {MAX_LAUNCHES[part]} at most"
            )
    if case.plan:
        _judge_counters(verdict, result["counters"])


def _judge_greedy(verdict: Verdict, result: dict, reference: dict | None, exact: Exact) -> None:
    if reference is None:
        verdict.faults.append(f"{verdict.case.reference.name} has no result to compare with")
        return
    for request, wanted, found in zip(REQUESTS, reference["token_ids"], result["token_ids"]):
        if not request.is_greedy:
            continue
        verdict.num_compared += 1
        distance = distance_where_parted(request, wanted, found, exact)
        if distance is None:
            continue
        if distance <= TIE[verdict.case.dtype]:
            verdict.ties.append(distance)
        else:
            verdict.num_parted += 1
            verdict.faults.append(
                f"{request.name!r}: {found}, stock vLLM there {wanted}; where they part, "
                f"{distance:.3g} from the best logit"
            )


def _judge_seeded(verdict: Verdict, result: dict, eager: dict | None) -> None:
    if eager is None:
        verdict.faults.append(f"{verdict.case.eager.name} has no result to compare with")
        return
    for request, wanted, found in zip(REQUESTS, eager["token_ids"], result["token_ids"]):
        if "seed" in request.params and wanted != found:
            verdict.faults.append(f"{request.name!r}: {found}, without graphs {wanted}")


def _judge_rounds(verdict: Verdict, replayed: dict[str, int]) -> None:
    """Of every kind of batch. Where one request at a time is speculated on, it may be that only
    greedy ones are."""
    kinds = ("greedy",) if verdict.case.is_single else KINDS
    wanted = {"level 2 round"} | {f"level 2 logits, {kind}" for kind in kinds}
    if verdict.case.plan == "fixed":
        wanted.add("level 2 round without selection")
    if verdict.case.has_draft:
        wanted |= {f"level 1 round, {kind}" for kind in kinds}
    verdict.faults += [f"no {name} was replayed" for name in sorted(wanted - set(replayed))]


def _judge_counters(verdict: Verdict, counters: dict[str, int]) -> None:
    """Or nothing was tested. Prompt lookup may find nothing to propose straight."""
    if verdict.case.offload and not counters["num_staged_bytes"]:
        verdict.faults.append("nothing was read of host memory")
    if verdict.case.plan == "plain":
        if counters["num_proposals"]:
            verdict.faults.append("something was proposed")
        return
    wanted = {"num_level2_drafted", "num_direct_proposals"}
    if verdict.case.selection:  # by itself, prompt lookup may be wrong each time
        wanted = {
            "num_level2_passes",
            "num_level2_drafted",
            "num_level2_accepted",
            "num_level3_rejections",
        }
    if verdict.case.plan == "dice" and verdict.case.has_draft:
        wanted.add("num_direct_proposals")
    verdict.faults += [f"{name} is 0" for name in sorted(wanted) if counters[name] == 0]
    for name in ("num_nan_requests", "num_boundary_faults"):
        if counters[name]:
            verdict.faults.append(f"{name} is {counters[name]}")


def read_log(path: Path, num_lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
