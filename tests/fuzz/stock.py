"""Stock vLLM's answers to the greedy requests of a stream, and what it is undecided about."""

import math
from contextlib import nullcontext

from tests.fuzz.drive import Answer, sampling_params
from tests.fuzz.engines import adapters, grammars_by, start_stock
from tests.fuzz.models import tokens_of
from tests.generation import NOISE
from tests.outputs import assert_close_tables


class Stock:
    """Stock engines, started when they are first needed and kept."""

    def __init__(self) -> None:
        self._engines: dict[tuple, object] = {}
        self.num_compared = 0
        self.num_ties = 0

    def _engine(self, model: str, lora: bool, **arguments):
        key = (model, lora, *arguments.items())
        if key not in self._engines:
            self._engines[key] = start_stock(model, lora, **arguments)
        return self._engines[key]

    def _outputs(
        self, llm, model: str, backend: str, requests: list[dict], logprobs: int | None = None
    ):
        lora = adapters(model) if any(request.get("lora") for request in requests) else None
        has_grammar = any("structured" in request["params"] for request in requests)
        with grammars_by(llm, backend) if has_grammar else nullcontext():
            return llm.generate(
                [{"prompt_token_ids": tokens_of(model, request["prompt"])} for request in requests],
                [sampling_params(request["params"], logprobs) for request in requests],
                lora_request=lora and [lora[request.get("lora", 0)] for request in requests],
                use_tqdm=False,
            )

    def differences(self, settings: dict, stream: list[dict], answers: list[Answer]) -> list[str]:
        """How the greedy answers differ from stock's; a line each, none where all is well."""
        model, lora, engine = settings["model"], settings["lora"], settings["engine"]
        mode = engine.get("logprobs_mode", "raw_logprobs")
        backend = engine.get("structured_outputs_config", {"backend": "auto"})["backend"]
        greedy = [
            i
            for i, request in enumerate(stream)
            if request["params"]["temperature"] == 0 and 0 in answers[i].choices
        ]
        if not greedy:
            return []
        llm = self._engine(model, lora, logprobs_mode=mode)
        outputs = self._outputs(llm, model, backend, [stream[i] for i in greedy])
        found = []
        for i, output in zip(greedy, outputs):
            self.num_compared += 1
            ours, stocks = answers[i].choices[0], output.outputs[0]
            wanted, has = list(stocks.token_ids), ours.token_ids
            if answers[i].is_aborted:
                wanted = wanted[: len(has)]
            if wanted != has:
                if self._is_undecided(model, lora, backend, stream[i], wanted, has):
                    self.num_ties += 1
                else:
                    found.append(f"tokens: request {i}: stock {wanted}, TriForce {has}")
                continue
            if answers[i].is_aborted:
                continue
            reason = [stocks.finish_reason], stocks.stop_reason
            if (ours.finish_reasons, ours.stop_reason) != reason:
                found.append(
                    f"reason: request {i}: stock {reason}, "
                    f"TriForce {ours.finish_reasons, ours.stop_reason}"
                )
            if ours.text != stocks.text:
                found.append(f"text: request {i}: stock {stocks.text!r}, TriForce {ours.text!r}")
            for name, wanted, has in (
                ("logprobs", stocks.logprobs, ours.logprobs),
                ("prompt_logprobs", output.prompt_logprobs, answers[i].prompt_logprobs),
            ):
                try:
                    assert_close_tables(wanted, has)
                except AssertionError as error:
                    found.append(f"{name}: request {i}: {error}")
            wanted, has = stocks.cumulative_logprob, ours.cumulative_logprob
            if wanted != has and not math.isclose(wanted, has, abs_tol=0.05):
                found.append(f"cumulative_logprob: request {i}: stock {wanted}, TriForce {has}")
        return found

    def _is_undecided(self, model, lora, backend, request, wanted, has) -> bool:
        """Whether stock's two best tokens, after penalties and masks, are as good as equal where
        the answers part."""
        place = next((i for i, (a, b) in enumerate(zip(wanted, has)) if a != b), None)
        if place is None:
            return False
        llm = self._engine(model, lora, logprobs_mode="processed_logprobs")
        output = self._outputs(llm, model, backend, [request], logprobs=2)[0].outputs[0]
        if list(output.token_ids)[:place] != wanted[:place]:
            return True  # stock differs from itself
        best = sorted(output.logprobs[place].items(), key=lambda item: -item[1].logprob)[:2]
        margin = best[0][1].logprob - best[1][1].logprob
        return {wanted[place], has[place]} == {token for token, _ in best} and margin < NOISE
