"""What a request must have of its own, whoever is beside it: a seed's tokens, level 2's acceptance.

Requests of a stream are driven again, each alone, in the engine that had them together.
"""

import math
import random
from dataclasses import dataclass, field

from tests.fuzz.drive import Answer, drive
from tests.fuzz.settings import seeds_must_hold

# Of a stream; the rest cost time.
MOST_SEEDED, MOST_SAMPLED = 4, 8
# A deficit of acceptance that is a fault, where it is so many standard errors as well.
LEAST_DEFICIT, LEAST_Z, LEAST_REQUESTS = 0.03, 3.5, 12


def alone(llm, model: str, request: dict) -> Answer:
    beside_others = ("arrive", "abort", "pause", "reset", "priority")
    kept = {name: value for name, value in request.items() if name not in beside_others}
    (answer,) = drive(llm, model, [kept | {"arrive": 0}])
    return answer


@dataclass
class Acceptance:
    """Accepted drafts of those tested, of each request in its batch and alone.

    Their difference is weighted as two proportions' is; its error is taken from how it varies from
    request to request, since a request's tokens are not independent.
    """

    pairs: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(accepted, tested) in a batch, then alone."""
    worst: tuple[float, list[dict]] = (0.0, [])
    """Drafts that a stream lost, and the stream."""

    def add(self, stream: list[dict], pairs: list[tuple[int, int, int, int]]) -> None:
        pairs = [pair for pair in pairs if pair[1] and pair[3]]
        self.pairs += pairs
        lost = sum(n * (c / m - a / n) for a, n, c, m in pairs)
        self.worst = max(self.worst, (lost, stream), key=lambda entry: entry[0])

    def deficit(self) -> tuple[float, float]:
        """Of acceptance in batches, and by how many standard errors."""
        weights = [n * m / (n + m) for _, n, _, m in self.pairs]
        lost = [c / m - a / n for a, n, c, m in self.pairs]
        mean = sum(w * d for w, d in zip(weights, lost)) / sum(weights)
        error = math.sqrt(sum((w * (d - mean)) ** 2 for w, d in zip(weights, lost)))
        return mean, mean * sum(weights) / max(error, 1e-9)

    def fault(self) -> str | None:
        if len(self.pairs) < LEAST_REQUESTS:
            return None
        mean, z = self.deficit()
        return self.text() if mean > LEAST_DEFICIT and z > LEAST_Z else None

    def text(self) -> str:
        if not self.pairs:
            return "nothing compared"
        (a, n, c, m), (mean, z) = map(sum, zip(*self.pairs)), self.deficit()
        return (
            f"deficit: {a} of {n} drafts accepted in batches, {c} of {m} alone; within requests "
            f"{mean:.3f} fewer, z={z:.1f}, {len(self.pairs)} requests"
        )


def compared_acceptance(
    llm, settings: dict, stream: list[dict], answers: list[Answer], number: int
) -> list[tuple[int, int, int, int]]:
    """Some sampled requests' acceptance in the batch and alone.

    Those alone of which lengths and routes do not depend on others, and that level 2 takes part in.
    """
    keys = settings["triforce"]
    if keys is None or "2" not in keys.get("levels", "1,2,3"):
        return []
    is_fixed = not keys.get("adaptive", True)
    chosen = [
        i
        for i, request in enumerate(stream)
        if request["params"]["temperature"]
        and (is_fixed or "seed" in request["params"])
        and any(choice.num_tested for choice in answers[i].choices.values())
    ]
    pairs = []
    for i in random.Random(number).sample(chosen, min(MOST_SAMPLED, len(chosen))):
        pair = []
        for answer in (answers[i], alone(llm, settings["model"], stream[i])):
            choices = answer.choices.values()
            pair += [sum(choice.num_accepted for choice in choices)]
            pair += [sum(choice.num_tested for choice in choices)]
        pairs.append(tuple(pair))
    return pairs


class Seeds:
    """Seeded requests against themselves alone."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.num_roundings = 0
        """Answers that differ with one seed and with none of two others."""

    def differences(
        self, llm, settings: dict, stream: list[dict], answers: list[Answer]
    ) -> list[str]:
        # A request that lost its KV cache begins a new proposal where it was.
        if not seeds_must_hold(settings) or any("reset" in request for request in stream):
            return []
        found = self._differing(llm, settings, stream, answers)
        if not found:
            return []
        # Rounding decides a draw once in about 1e5: other seeds show what is not rounding.
        for more in (1, 2):
            again = [_reseeded(request, more) for request in stream]
            answers = drive(llm, settings["model"], again)
            if self._differing(llm, settings, again, answers):
                return found
        self.num_roundings += 1
        return []

    def _differing(self, llm, settings, stream, answers) -> list[str]:
        found = []
        seeded = [
            i
            for i, request in enumerate(stream)
            if request["params"]["temperature"]
            and "seed" in request["params"]
            and not answers[i].is_aborted
        ]
        for i in seeded[:MOST_SEEDED]:
            self.num_compared += 1
            has = [answers[i].choices[n].token_ids for n in sorted(answers[i].choices)]
            own = alone(llm, settings["model"], stream[i])
            wanted = [own.choices[n].token_ids for n in sorted(own.choices)]
            if has != wanted:
                found.append(f"tokens: request {i}: alone {wanted}, beside others {has}")
        return found


def _reseeded(request: dict, more: int) -> dict:
    params = request["params"]
    if "seed" not in params:
        return request
    return request | {"params": params | {"seed": params["seed"] + more}}
