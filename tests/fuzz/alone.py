"""What a seeded request must have of its own, whoever is beside it: its tokens.

Requests of a stream are driven again, each alone, in the engine that had them together.
"""

from tests.fuzz.drive import Answer, drive
from tests.fuzz.settings import seeds_must_hold

# Of a stream; the rest cost time.
MOST_SEEDED = 4


def alone(llm, model: str, request: dict) -> Answer:
    beside_others = ("arrive", "abort", "pause", "reset", "priority")
    kept = {name: value for name, value in request.items() if name not in beside_others}
    (answer,) = drive(llm, model, [kept | {"arrive": 0}])
    return answer


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
