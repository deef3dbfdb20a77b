"""One engine after another, streams through each; what is wrong is shrunk and kept."""

import gc
import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.fuzz import engines
from tests.fuzz.alone import Acceptance, Seeds, compared_acceptance
from tests.fuzz.boundary import BoundaryWatch
from tests.fuzz.checks import badly_answered, kept
from tests.fuzz.distribution import Distribution
from tests.fuzz.drive import drive
from tests.fuzz.settings import max_model_len_of
from tests.fuzz.stock import Stock
from tests.inside import worker_of


@dataclass(frozen=True)
class Fault:
    """Something wrong with a stream."""

    check: str
    """``engine``, ``boundary``, ``greedy``, ``answers``, ``kept``, ``sampled``, ``seeds`` or
    ``acceptance``."""
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
        runner = worker_of(self.llm).model_runner
        # Model Runner V2 has no such boundary: it reads draft logits from a buffer of its own.
        is_v1 = hasattr(runner, "drafter")
        self.watch = BoundaryWatch(runner) if is_v1 else None
        self.acceptance = Acceptance()

    def boundary_faults(self) -> list[Fault]:
        """Of the steps since they were asked for."""
        lines = [] if self.watch is None else self.watch.take()
        return [Fault("boundary", line) for line in dict.fromkeys(lines)]

    def end(self) -> None:
        """Also of one that is broken."""
        if "connector" in self.settings["engine"]:
            from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

            ensure_kv_transfer_shutdown()
        self.llm = self.watch = None
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
            pairs = compared_acceptance(running.llm, settings, stream, answers, seed)
            unlike = self.seeds.differences(running.llm, settings, stream, answers)
            left = kept(running.llm, model)
        except Exception as error:
            return [*running.boundary_faults(), Fault("engine", _where(error), True)]
        running.acceptance.add(stream, pairs)
        faults = running.boundary_faults()
        faults += [Fault("seeds", what) for what in unlike]
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
