"""Insides of an engine in this process, for tests that look at them or change them."""

import copy


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def built(llm):
    """What our worker has put together once the models are loaded."""
    triforce = worker_of(llm).triforce
    return getattr(triforce, "built", triforce)  # Runner V1's adapter has the parts itself


def controller_of(llm):
    return built(llm).speculator.controller


def attention_layers_of(llm) -> list:
    """The target's layers that level 2 of Runner V1 retrieves for."""
    return built(llm).speculator.level2.attention.layers


def drive(llm, arrivals: dict[int, list]) -> dict:
    """Step an engine until all requests have ended.

    Args:
        arrivals: by step, (name, prompt, parameters) of the requests that come, or with a priority.

    Returns:
        The last output of each request, by name.
    """
    engine, found, count = llm.llm_engine, {}, sum(map(len, arrivals.values()))
    for step in range(3000):
        for name, prompt, params, *priority in arrivals.get(step, ()):
            engine.add_request(
                name, {"prompt_token_ids": prompt}, params, priority=priority[0] if priority else 0
            )
        found |= {o.request_id: o for o in engine.step() if o.finished}
        if len(found) == count:
            return found
    raise AssertionError(f"unfinished after 3,000 steps: {count - len(found)} requests")


def send_piece(llm, name: str, tokens: list[int] | None, params) -> None:
    """Send a piece of a session's input.

    Args:
        tokens: None if nothing more comes.
    """
    engine = llm.llm_engine
    request = engine.input_processor.process_inputs(
        name,
        {"prompt_token_ids": list(tokens or [0])},  # which is extended
        params,
        supported_tasks=engine.get_supported_tasks(),
        resumable=tokens is not None,
    )
    request.external_req_id = name
    # Both extend the prompt, each its own: usually they are in two processes.
    engine.engine_core.add_request(copy.deepcopy(request))
    engine.output_processor.add_request(request, None)
