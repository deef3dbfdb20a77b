"""What must hold of every stream, whatever came out."""

from tests.fuzz.drive import Answer, drive
from tests.fuzz.models import tokens_of
from tests.inside import scheduler_of, worker_of


def badly_answered(
    model: str, max_model_len: int, stream: list[dict], answers: list[Answer]
) -> list[str]:
    """Every request is answered exactly once, as long as it should be, for the reason it says."""
    found = []
    for i, (request, answer) in enumerate(zip(stream, answers)):
        params = request["params"]
        if answer.num_after_end:
            found.append(f"twice: request {i}: {answer.num_after_end} outputs after its end")
        if answer.is_aborted:
            continue
        if answer.num_finished != 1:
            found.append(f"lost: request {i} was finished {answer.num_finished} times")
            continue
        if sorted(answer.choices) != list(range(params.get("n", 1))):
            found.append(f"lost: request {i} has choices {sorted(answer.choices)}")
        if "turns" in request:  # whose lengths are those of its turns together
            continue
        room = max_model_len - len(tokens_of(model, request["prompt"]))
        for choice in answer.choices.values():
            found += [f"{what}: request {i}" for what in _wrong(params, choice, room)]
    return found


def _wrong(params: dict, choice, room: int) -> list[str]:
    length, most = len(choice.token_ids), min(params["max_tokens"], room)
    reasons = choice.finish_reasons
    if reasons not in (["length"], ["stop"]) and not (
        reasons == ["repetition"] and "repetition" in params
    ):
        return [f"reason {reasons}"]
    if reasons == ["length"] and length != most:
        return [f"length: {length} tokens of {most}"]
    if length > most or length < min(params.get("min_tokens", 0), most):
        return [f"length: {length} tokens, at most {most}, for {params.get('min_tokens', 0)}"]
    if choice.logprobs is not None and len(choice.logprobs) != length:
        return [f"logprobs of {len(choice.logprobs)} tokens of {length}"]
    stops = params.get("stop_token_ids", [])
    floor = max(params.get("min_tokens", 0) - 1, 0)
    if early := [token for token in choice.token_ids[floor:-1] if token in stops]:
        return [f"stop token {early} inside"]
    if allowed := params.get("allowed_token_ids"):
        # An end that is not among them is forbidden too.
        outside = set(choice.token_ids) - set(allowed)
        return [f"tokens {outside} are not allowed"] if outside else []
    return []


def kept(llm, model: str) -> list[str]:
    """What is still held after the last request: blocks, slots, entries of dictionaries."""
    # Private caches are released at the next proposal: one more request, which keeps its own.
    tail = {
        "prompt": {"kind": "text", "start": 5000, "length": 3},
        "params": {"max_tokens": 2, "temperature": 0, "ignore_eos": True},
        "arrive": 0,
    }
    drive(llm, model, [tail])
    is_control = not hasattr(worker_of(llm), "triforce")
    held = {} if is_control else llm.collective_rpc("triforce_held_requests")[0]
    found = [f"kept by {name}: {count} requests" for name, count in held.items() if count > 1]
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    if (num_free := pool.get_num_free_blocks()) != pool.num_gpu_blocks - 1:  # vLLM's null block
        found.append(f"kept blocks: {num_free} of {pool.num_gpu_blocks - 1} are free")
    known = {
        "scheduler": len(scheduler.requests),
        "front": len(llm.llm_engine.output_processor.request_states),
        "runner": max(0, len(getattr(worker_of(llm).model_runner, "requests", ())) - 1),
    }
    return found + [f"kept by vLLM's {name}: {count}" for name, count in known.items() if count]
