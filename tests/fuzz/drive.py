"""Drives a stream of requests through an engine, step by step, and notes what came out."""

import time
from dataclasses import dataclass, field

from tests.fuzz.engines import adapters
from tests.fuzz.models import tokens_of
from tests.inside import scheduler_of, send_piece

MAX_STEPS = 4000
# As long as nothing can run, as while a grammar is compiled, steps are empty and take no time.
MAX_SECONDS_WAITING = 20.0


@dataclass
class Choice:
    """One completion."""

    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Of each token within the tokens of its step."""
    finish_reasons: list[str] = field(default_factory=list)
    """Every one that was reported; of a session one for each turn."""
    logprobs: list | None = None
    text: str = ""
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None


@dataclass
class Answer:
    """What came out of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    num_finished: int = 0
    is_aborted: bool = False
    num_after_end: int = 0
    """Outputs after the request had finished or was aborted."""
    prompt_logprobs: list | None = None


class DoesNotEnd(Exception):
    """The engine goes on stepping and nothing comes of it."""


def sampling_params(params: dict, stock_logprobs: int | None = None):
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    keys = dict(params)
    if structured := keys.pop("structured", None):
        structured = dict(structured)
        if classes := structured.pop("classes", None):
            structured["regex"] = "(" + "".join(f"[{c}]" for c in classes) + ")+"
        keys["structured_outputs"] = StructuredOutputsParams(**structured)
    if bias := keys.pop("logit_bias", None):
        keys["logit_bias"] = {token: float(value) for token, value in bias}
    if words := keys.pop("bad_words_token_ids", None):
        keys["_bad_words_token_ids"] = words  # which the tokenizer's words become
    if repetition := keys.pop("repetition", None):
        keys["repetition_detection"] = RepetitionDetectionParams(**repetition)
    if stock_logprobs is not None:
        keys["logprobs"] = stock_logprobs
    has_text = bool(keys.pop("text", False) or "stop" in keys)
    return SamplingParams(detokenize=has_text, **keys)


def drive(llm, model: str, stream: list[dict]) -> list[Answer]:
    """One answer for each request of the stream."""
    engine = llm.llm_engine
    answers = [Answer() for _ in stream]
    lora = adapters(model) if any(request.get("lora") for request in stream) else {}
    waiting = sorted(range(len(stream)), key=lambda i: stream[i]["arrive"])
    due: dict[int, list[tuple[str, int]]] = {}
    turns = {i: list(request["turns"]) for i, request in enumerate(stream) if "turns" in request}
    step = num_working = 0
    last_worked = time.monotonic()
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests() and not due:
            step = max(step, stream[waiting[0]]["arrive"])
        while waiting and stream[waiting[0]]["arrive"] <= step:
            number = waiting.pop(0)
            request = stream[number]
            tokens = tokens_of(model, request["prompt"])
            if number in turns:
                send_piece(llm, str(number), tokens, sampling_params(request["params"]))
            else:
                engine.add_request(
                    str(number),
                    {"prompt_token_ids": tokens},
                    sampling_params(request["params"]),
                    priority=request.get("priority", 0),
                    lora_request=lora.get(request.get("lora", 0)),
                )
            for what in ("abort", "reset"):
                if what in request:
                    due.setdefault(step + request[what], []).append((what, number))
            if "pause" in request:
                after, steps = request["pause"]
                due.setdefault(step + after, []).append(("pause", number))
                due.setdefault(step + after + steps, []).append(("resume", number))
        for what, number in due.pop(step, ()):
            if what == "reset":
                assert engine.reset_prefix_cache(reset_running_requests=True)
            elif what == "pause":
                engine.sleep(level=0, mode="keep")
            elif what == "resume":
                engine.wake_up(tags=["scheduling"])
            elif not answers[number].num_finished:
                engine.abort_request([str(number)])
                answers[number].is_aborted = True
        for output in engine.step():
            number = int(output.request_id)
            _note(answers[number], output)
            if number in turns and output.outputs[0].finish_reason is not None:
                following = turns[number].pop(0) if turns[number] else None
                piece = following and tokens_of(model, following)
                send_piece(llm, str(number), piece, sampling_params(stream[number]["params"]))
                answers[number].num_finished += following is None
        step += 1
        if scheduler_of(llm).running:
            num_working, last_worked = num_working + 1, time.monotonic()
        elif engine.has_unfinished_requests():
            time.sleep(0.001)
            if time.monotonic() - last_worked > MAX_SECONDS_WAITING:
                raise DoesNotEnd(f"nothing runs for {MAX_SECONDS_WAITING} seconds")
        if num_working > MAX_STEPS:
            raise DoesNotEnd(f"{MAX_STEPS} steps")
    engine.wake_up(tags=["scheduling"])
    return answers


def _note(answer: Answer, output) -> None:
    if answer.is_aborted or answer.num_finished:
        answer.num_after_end += 1
        return
    answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
    for found in output.outputs:
        choice = answer.choices.setdefault(found.index, Choice())
        tokens = list(found.token_ids)
        if not choice.finish_reasons or not output.finished:
            choice.places += range(len(tokens) - len(choice.token_ids))
            choice.token_ids, choice.logprobs = tokens, found.logprobs
            choice.text, choice.stop_reason = found.text, found.stop_reason
            choice.cumulative_logprob = found.cumulative_logprob
        elif len(tokens) != len(choice.token_ids):
            answer.num_after_end += 1
        if found.finish_reason is not None and not (
            choice.finish_reasons and len(output.outputs) > 1
        ):
            choice.finish_reasons.append(found.finish_reason)
    answer.num_finished += output.finished
