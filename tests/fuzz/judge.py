"""One engine after another, streams through each; what is wrong is shrunk and kept."""

import gc
import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.fuzz import engines
from tests.fuzz.alone import Seeds
from tests.fuzz.distribution import Distribution
from tests.fuzz.drive import Answer, drive
from tests.fuzz.models import tokens_of
from tests.fuzz.settings import max_model_len_of
from tests.fuzz.stock import Stock
from tests.inside import scheduler_of, worker_of


@dataclass(frozen=True)
class Fault:
    """Something wrong with a stream."""

    check: str
    """``engine``, ``greedy``, ``answers``, ``kept``, ``sampled``, ``seeds`` or ``distribution``."""
    what: str
    ends_engine: bool = False

    @property
    def kind(self) -> str:
        """The same for faults that are probably one; text up to the first colon says it."""
        return f"{self.check}: {self.what.split(': ')[0]}"


class Running:
    """An engine with TriForce that streams are driven through."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.llm = engines.start(settings)

    def end(self) -> None:
        """Also of one that is broken."""
        if "connector" in self.settings["engine"]:
            from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

            ensure_kv_transfer_shutdown()
        self.llm = None
        gc.collect()


@dataclass
class Judge:
    """Figures and pools of a whole run."""

    stock: Stock = field(default_factory=Stock)
    seeds: Seeds = field(default_factory=Seeds)
    distribution: Distribution = field(default_factory=Distribution)
    counts: Counter = field(default_factory=Counter)

    def check(self, running: Running, stream: list[dict], seed: int, pools: bool = True):
        """Drives one stream and checks it.

        Args:
            seed: of the noise of requests without a seed of their own.
            pools: whether its sampled tokens count.

        Returns:
            Faults, the worst first.
        """
        settings, model = running.settings, running.settings["model"]
        torch.manual_seed(seed)
        try:
            answers = drive(running.llm, model, stream)
            unlike = self.seeds.differences(running.llm, settings, stream, answers)
            left = kept(running.llm, model)
        except Exception as error:
            return [Fault("engine", _where(error), True)]
        faults = [Fault("seeds", what) for what in unlike]
        faults += [Fault("kept", what, True) for what in left]
        badly = badly_answered(model, max_model_len_of(settings), stream, answers)
        faults += [Fault("answers", what) for what in badly]
        differences = self.stock.differences(settings, stream, answers)
        faults += [Fault("greedy", what) for what in differences]
        distribution = self.distribution if pools else Distribution()
        mode = settings["engine"].get("logprobs_mode", "raw_logprobs")
        if "kv_cache_dtype" not in settings["engine"]:  # which the distribution's model lacks
            faults += [
                Fault("sampled", what) for what in distribution.add(model, stream, answers, mode)
            ]
        if pools:
            self.counts["requests"] += len(stream)
            self.counts["tokens"] += sum(
                len(choice.token_ids) for answer in answers for choice in answer.choices.values()
            )
            self.counts["aborted"] += sum(answer.is_aborted for answer in answers)
        return faults


def _where(error: Exception) -> str:
    """The innermost function, and the message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "vllm_triforce" in f.filename]
    place = f"{frame.name}" + (f" from {ours[-1].name}" if ours and ours[-1] != frame else "")
    return f"{type(error).__name__} in {place}: {str(error)[:300]}"


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
