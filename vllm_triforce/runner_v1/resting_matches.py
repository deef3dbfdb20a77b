"""Matches of resting requests: a rest ends as soon as a request has a match that pays."""

from vllm_triforce.runner_v1.batch import RunnerBatch
from vllm_triforce.runner_v1.levels import Matches
from vllm_triforce.runner_v1.sources.source import TokenSource
from vllm_triforce.runner_v1.speculator import TriForceSpeculator


class RestingMatches:
    """Looks for matches in plain steps.

    Whether prompt lookup pays changes from token to token, and a decision only sees the match of
    its step. To look for one takes some microseconds, so each step looks at one request. All ranks
    of a tensor-parallel group do the same: nothing here depends on a clock.

    Args:
        runner: vLLM's runner.
    """

    def __init__(self, runner, batch: RunnerBatch, speculator: TriForceSpeculator) -> None:
        self._runner = runner
        self._batch = batch
        self._speculator = speculator
        self._sources = {
            name: source
            for name, source in speculator.level1.sources.items()
            if isinstance(source, TokenSource)
        }
        self._num_looks = 0
        self._rest = -1
        self._known: dict[tuple, bool] = {}
        """Whether a request with a confidence would propose, in the present rest."""

    def __call__(self, scheduler_output) -> bool:
        """True if the request whose turn it is would propose."""
        controller, requests = self._speculator.controller, scheduler_output.scheduled_cached_reqs
        if not self._sources or "gamma" not in controller.chooses or not requests.req_ids:
            return False
        if self._rest != controller.num_decisions:
            self._rest = controller.num_decisions
            self._known.clear()
        self._num_looks += 1
        turn = self._num_looks % len(requests.req_ids)
        name, num_computed = requests.req_ids[turn], requests.num_computed_tokens[turn]
        row = self._runner.input_batch.req_id_to_index.get(name)
        if row is None or scheduler_output.num_scheduled_tokens[name] != 1:
            return False
        token_ids = self._runner.input_batch.token_ids_cpu[row, : num_computed + 1]
        matches = {n: [source.find(token_ids)] for n, source in self._sources.items()}
        confidence = Matches(matches).confidence(0)
        if not confidence or self._batch.has_seed(row):
            return False
        key = name, *sorted(confidence.items())
        if key not in self._known:
            num_plain = len(requests.req_ids) - 1
            self._known[key] = self._would_propose(row, num_computed, confidence, num_plain)
        return self._known[key]

    def _would_propose(
        self, row: int, num_computed: int, confidence: dict[str, int], num_plain: int
    ) -> bool:
        controller = self._speculator.controller
        max_tokens = controller.config.num_speculative_tokens
        most = self._batch.max_proposal_len(row, num_computed, max_tokens)
        if most <= 0:
            return False
        candidate = self._speculator.candidate(
            self._runner.input_batch.req_ids[row],
            num_computed,
            most,
            confidence,
            False,
            self._batch.is_greedy(row),
            self._batch.num_remaining_tokens(row, num_computed),
        )
        return controller.would_propose(candidate, num_plain)
