"""Stock vLLM's answers to the greedy requests of a stream, and what it is undecided about."""

import gc
import math
from contextlib import nullcontext

from tests.fuzz.drive import Answer, drive
from tests.fuzz.engines import OF_STOCK, grammars_by, start_stock, without_connector
from tests.generation import NOISE
from tests.outputs import assert_close_tables

MOST_ENGINES = 4
# Rounding may move a key or value to the next number of 8 bits.
FP8_NOISE = 0.05


class Stock:
    """Stock engines, started when they are first needed and kept."""

    def __init__(self) -> None:
        self._engines: dict[tuple, object] = {}
        self.num_compared = 0
        self.num_ties = 0

    def _engine(self, settings: dict, **changes):
        """Change the engine's arguments by ``changes``."""
        settings = settings | {"engine": settings["engine"] | changes}
        own = [(name, settings["engine"].get(name)) for name in OF_STOCK]
        key = (settings["model"], settings["lora"], *own)
        if key not in self._engines:
            while len(self._engines) >= MOST_ENGINES:
                self._engines.pop(next(iter(self._engines)))
                gc.collect()
            self._engines[key] = start_stock(settings)
        self._engines[key] = self._engines.pop(key)
        return self._engines[key]

    def _answers(self, llm, settings: dict, requests: list[dict]) -> list[Answer]:
        model, engine = settings["model"], settings["engine"]
        kept = ("prompt", "params", "turns", "lora")
        requests = [
            {"arrive": 0} | {name: request[name] for name in kept if name in request}
            for request in requests
        ]
        backend = engine.get("structured_outputs_config", {"backend": "auto"})["backend"]
        has_grammar = any("structured" in request["params"] for request in requests)
        # Where one with a thinking budget leaves, V1 leaves its state to another
        # (patches/README.md).
        batches = [[request] for request in requests] if "reasoning" in engine else [requests]
        with grammars_by(llm, backend) if has_grammar else nullcontext():
            return [answer for batch in batches for answer in drive(llm, model, batch)]

    def differences(self, settings: dict, stream: list[dict], answers: list[Answer]) -> list[str]:
        """How the greedy answers differ from stock's; a line each, none where all is well."""
        greedy = [
            i
            for i, request in enumerate(stream)
            if request["params"]["temperature"] == 0 and 0 in answers[i].choices
        ]
        if not greedy:
            return []
        with without_connector():
            llm = self._engine(settings)
            wanted = self._answers(llm, settings, [stream[i] for i in greedy])
            return [
                what
                for i, answer in zip(greedy, wanted)
                for what in self._differences(settings, stream[i], i, answer, answers[i])
            ]

    def _differences(self, settings, request, i: int, stock: Answer, triforce: Answer) -> list[str]:
        self.num_compared += 1
        found = []
        ours, stocks = triforce.choices[0], stock.choices[0]
        wanted, has = stocks.token_ids, ours.token_ids
        if triforce.is_aborted:
            wanted = wanted[: len(has)]
        if wanted != has:
            if self._is_undecided(settings, request, wanted, has):
                self.num_ties += 1
                return []
            return [f"tokens: request {i}: stock {wanted}, TriForce {has}"]
        if triforce.is_aborted:
            return []
        reason = stocks.finish_reasons, stocks.stop_reason
        if (ours.finish_reasons, ours.stop_reason) != reason:
            found.append(
                f"reason: request {i}: stock {reason}, "
                f"TriForce {ours.finish_reasons, ours.stop_reason}"
            )
        if ours.text != stocks.text:
            found.append(f"text: request {i}: stock {stocks.text!r}, TriForce {ours.text!r}")
        if "kv_cache_dtype" in settings["engine"]:
            return found
        for name, wanted, has in (
            ("logprobs", stocks.logprobs, ours.logprobs),
            ("prompt_logprobs", stock.prompt_logprobs, triforce.prompt_logprobs),
        ):
            try:
                assert_close_tables(wanted, has)
            except AssertionError as error:
                found.append(f"{name}: request {i}: {error}")
        wanted, has = stocks.cumulative_logprob, ours.cumulative_logprob
        if wanted != has and not math.isclose(wanted, has, abs_tol=0.05):
            found.append(f"cumulative_logprob: request {i}: stock {wanted}, TriForce {has}")
        return found

    def _is_undecided(self, settings, request, wanted, has) -> bool:
        """Whether stock's two best tokens, after penalties and masks, are as good as equal where
        the answers part."""
        place = next((i for i, (a, b) in enumerate(zip(wanted, has)) if a != b), None)
        if place is None or "turns" in request:
            return False
        llm = self._engine(settings, logprobs_mode="processed_logprobs")
        asked = request | {"params": request["params"] | {"logprobs": 2}}
        answer = self._answers(llm, settings, [asked])[0].choices[0]
        if answer.token_ids[:place] != wanted[:place]:
            return True  # stock differs from itself
        best = sorted(answer.logprobs[place].items(), key=lambda item: -item[1].logprob)[:2]
        margin = best[0][1].logprob - best[1][1].logprob
        noise = FP8_NOISE if "kv_cache_dtype" in settings["engine"] else NOISE
        return {wanted[place], has[place]} == {token for token, _ in best} and margin < noise
