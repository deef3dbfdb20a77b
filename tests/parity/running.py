"""A case, made ready for a runner, and what was seen when it ran: the same for both runners."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tests.images import as_prompt
from tests.inside import drive, scheduler_of, send_piece
from tests.parity.cases import Case, Request
from tests.parity.disturbing import watch
from vllm_triforce.config.draft_sources import HEAD_SOURCE, SOURCES


@dataclass(frozen=True)
class Job:
    """A case with models, tokens and parameters in the place of what stands for them."""

    name: str
    target: str
    triforce: dict
    engine: dict
    rounds: list[list[tuple[list[int], dict]]]
    """Of each batch, each request's prompt and parameters; with them the folder of its LoRA
    adapter, ``adapter``, if it has one."""
    every: int
    disturbance: tuple
    dice: int = 0
    is_session: bool = False


@dataclass
class Batch:
    """What was seen of one round."""

    outputs: list
    """vLLM's ``RequestOutput``, as the requests came."""
    counted: object
    """``LevelCounters``, of this round."""
    num_preempted: int | None
    """None where the case does not ask for statistics."""
    disturbed: dict
    """What the disturbance said; empty without one."""
    runs: list[list[int]]
    """Of requests with a grammar, the tokens that each step accepted."""


@dataclass
class Seen:
    batches: list[Batch]
    policy: str
    held: dict[str, int]
    """How many requests something is kept for, when all have ended."""
    num_blocks_held: int
    """KV blocks that are not free then."""


def run(job: Job, driver) -> Seen:
    """
    Args:
        driver: a runner, and how to reach into it (``host.py``, ``device.py``).
    """
    llm = driver.engine(job)
    scheduler = scheduler_of(llm)
    batches = []
    for number, requests in enumerate(job.rounds):
        kind = job.disturbance if number == 0 else ()
        before, preempted = _counters(llm), _num_preempted(llm, job)
        disturbed = driver.disturbed(llm, *kind) if kind else contextlib.nullcontext({})
        with (
            disturbed as said,
            watch(scheduler.structured_output_manager, "accept_tokens") as accepted,
        ):
            if job.is_session:
                outputs = converse(llm, requests)
            else:
                outputs = _outputs(llm, requests, job.every)
        now = _num_preempted(llm, job)
        batches.append(
            Batch(
                outputs,
                _counters(llm).since(before),
                None if now is None else now - preempted,
                dict(said),
                [tokens for (_, tokens), _ in accepted],
            )
        )
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's null block
    return Seen(batches, driver.policy(llm), driver.held(llm), held)


def sampling_params(params: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = {"temperature": 0, "ignore_eos": True, **params}
    params.pop("adapter", None)
    params.pop("images", None)
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return SamplingParams(**params)


def lora_request(params: dict):
    """For ``adapter``, the folder of one, if there is any."""
    if "adapter" not in params:
        return None
    from vllm.lora.request import LoRARequest

    folder = params["adapter"]
    return LoRARequest(folder, int(Path(folder).name.split("-")[1]), folder)


def generate(llm, requests: list[tuple[list[int], dict]]) -> list:
    return llm.generate(
        [as_prompt(prompt, params.get("images", ())) for prompt, params in requests],
        [sampling_params(params) for _, params in requests],
        use_tqdm=False,
        lora_request=[lora_request(params) for _, params in requests],
    )


def converse(llm, pieces: list[tuple[list[int], dict]]) -> list:
    """Answers to the pieces of one session's input, each sent when the last one is answered."""
    answers: list = []
    num_before = 0
    for number, (prompt, params) in enumerate(pieces):
        send_piece(llm, "session", prompt, sampling_params(params))
        while len(answers) == number:
            answers += [o for o in llm.llm_engine.step() if o.outputs[0].finish_reason is not None]
        said = answers[-1].outputs[0]  # with what the turns before have said
        said.token_ids, num_before = said.token_ids[num_before:], len(said.token_ids)
    send_piece(llm, "session", None, sampling_params({}))
    return answers


def _outputs(llm, requests, every: int) -> list:
    if not every:
        return generate(llm, requests)
    arrivals = {
        every * number: [(str(number), prompt, sampling_params(params))]
        for number, (prompt, params) in enumerate(requests)
    }
    found = drive(llm, arrivals)
    return [found[str(number)] for number in range(len(requests))]


def _counters(llm):
    from vllm_triforce.metrics.report import counters_of

    return counters_of(llm)


def _num_preempted(llm, job: Job) -> int | None:
    if job.engine.get("disable_log_stats", True):
        return None
    return next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def make_job(case: Case, models, stock) -> Job:
    """
    Args:
        stock: gives what stock vLLM says to a prompt of a model.
    """
    from tests.conftest import triforce

    model = models[case.model]
    keys = dict(case.keys)
    if case.keys.get("levels") == "3":  # which drafts nothing
        keys["min_context"] = None
    elif case.keys.get("levels") != "2,3":
        keys["draft_sources"] = case.source
        if case.source == HEAD_SOURCE:
            keys["model"] = model.head
        elif SOURCES[case.source].needs_model:
            keys["model"] = model.target if case.drafts_by_target else model.draft
    if name := case.level2_model:
        keys["level2_model"] = model.level2_models.get(name, name)
    rounds = [[_asked(request, model, stock) for request in batch] for batch in case.rounds]
    return Job(
        case.name,
        model.target,
        triforce(**keys),
        {**case.engine, "skip_tokenizer_init": not model.has_tokenizer},
        rounds,
        case.every,
        case.disturbance,
        case.dice,
        case.is_session,
    )


def _asked(request: Request, model, stock) -> tuple[list[int], dict]:
    """A request's prompt and parameters."""
    prompt = model.text[request.start : request.start + request.length]
    assert len(prompt) == request.length, request
    if request.turn_after:
        before, params = _asked(request.turn_after, model, stock)
        prompt = before + list(stock.completion(model, before, params).token_ids) + prompt
    params = request.params
    if callable(params):
        params = params(stock.usual(model))
    if request.images:
        params = {**params, "images": request.images}
        step = len(prompt) // (1 + len(request.images))
        for number, seed in reversed([*enumerate(request.images, 1)]):
            place, kind = number * step, "image" if seed > 0 else "video"
            prompt = [*prompt[:place], *model.image_tokens[kind], *prompt[place:]]
    if request.adapter:
        params = {**params, "adapter": model.adapters[request.adapter - 1]}
    return prompt, {"detokenize": model.has_tokenizer, **params}
