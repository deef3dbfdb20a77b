"""End a rest early when a request's match pays."""

import math

from vllm_triforce.runner_v1.batch import RunnerBatch
from vllm_triforce.runner_v1.levels import Matches
from vllm_triforce.runner_v1.sources.source import TokenSource
from vllm_triforce.runner_v1.speculator import SpeculatorV1


class RestingMatches:
    """Looks for matches in plain steps.

    Whether prompt lookup pays changes from token to token, and a decision only sees the matches of
    its step. Each step looks at one request, in turns. All ranks of a tensor-parallel group do the
    same: nothing here depends on a clock.

    Args:
        runner: vLLM's runner.
    """

    def __init__(self, runner, batch: RunnerBatch, speculator: SpeculatorV1) -> None:
        self._runner = runner
        self._batch = batch
        self._speculator = speculator
        self._num_looks = 0
        self._rest = -1, 0
        """Number of decisions, and of the batch's requests."""
        self._pays: dict[tuple, bool] = {}
        """Results of ``would_propose()`` in this rest, by request and match class."""

    def __call__(self, scheduler_output) -> bool:
        """True if a proposal for the request whose turn it is would pay."""
        controller, requests = self._speculator.controller, scheduler_output.scheduled_cached_reqs
        num_reqs = len(requests.req_ids)
        # A step that reads a prompt proposes nothing where it gives a first token.
        if not num_reqs or scheduler_output.total_num_scheduled_tokens != num_reqs:
            return False
        if "context" not in controller.chooses or not self._may_pay(num_reqs):
            return False
        if self._rest != (controller.num_decisions, num_reqs):
            self._rest = controller.num_decisions, num_reqs
            self._pays.clear()
        self._num_looks += 1
        turn = self._num_looks % num_reqs
        name, num_computed = requests.req_ids[turn], requests.num_computed_tokens[turn]
        row = self._runner.input_batch.req_id_to_index.get(name)
        # Of a request without a decision would_propose() would create state that nothing releases.
        if row is None or name not in controller.acceptance.requests or self._batch.has_seed(row):
            return False
        max_tokens = controller.config.num_speculative_tokens
        max_tokens = self._batch.max_proposal_len(row, num_computed, max_tokens)
        if max_tokens < 2:  # one token less is left at the decision
            return False
        match_classes = self._match_classes(row, num_computed + 1)
        key = name, *sorted(match_classes.items())
        if match_classes and key not in self._pays:
            candidate = self._speculator.candidate(
                name,
                num_computed,
                max_tokens,
                match_classes,
                False,
                self._batch.is_greedy(row),
                self._batch.num_remaining_tokens(row, num_computed),
            )
            others = [n for i, n in enumerate(requests.num_computed_tokens) if i != turn]
            self._pays[key] = controller.would_propose(candidate, others)
        return bool(match_classes) and self._pays[key]

    def _may_pay(self, num_reqs: int) -> bool:
        """True if one request's proposal, accepted as a whole, could pay for the whole batch."""
        controller = self._speculator.controller
        gain = math.log1p(controller.config.num_speculative_tokens) / num_reqs
        return gain > math.log1p(controller.model.error)

    def _match_classes(self, row: int, num_tokens: int) -> dict[str, int]:
        """Return the match class of each source that has a match for a row's first tokens."""
        sources = list(self._speculator.level1.sources.values())
        if "gamma" not in self._speculator.controller.chooses:
            sources = sources[:1]
        # A copy: a source may keep or change its input.
        token_ids = self._runner.input_batch.token_ids_cpu[row, :num_tokens].copy()
        matches = {s.name: [s.find(token_ids)] for s in sources if isinstance(s, TokenSource)}
        return Matches(matches).classes(0)
