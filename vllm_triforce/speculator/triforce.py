"""TriForce's proposal: the two inner levels, nested (paper, algorithm 1)."""

import time

from vllm.logger import init_logger

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.speculator.draft_batch import DraftBatch, Proposal
from vllm_triforce.speculator.level1 import Level1
from vllm_triforce.speculator.retrieval import RetrievalLevel
from vllm_triforce.verification.inner import verify
from vllm_triforce.verification.noise import InnerNoise

logger = init_logger("vllm.triforce")


class TriForceSpeculator:
    """Level 1 drafts, level 2 verifies, until the proposal is long enough.

    Args:
        gamma: tokens that level 1 drafts for a pass of level 2.
    """

    def __init__(
        self,
        level1: Level1,
        level2: RetrievalLevel,
        gamma: int,
        noise: InnerNoise,
        counters: LevelCounters,
    ) -> None:
        self.level1 = level1
        self.level2 = level2
        self.gamma = gamma
        self.noise = noise
        self.counters = counters
        self.set_aside: set[str] = set()
        """Requests that are not speculated on again, because a level's logits had a NaN."""
        self._has_warned = False

    def propose(self, batch: DraftBatch) -> Proposal:
        """Proposes up to ``batch.max_num_tokens`` tokens for each request."""
        start = time.perf_counter()
        greedy = batch.sampling.all_greedy
        proposal = Proposal.empty(len(batch), greedy)
        self.level2.begin(batch)
        self.counters.add_time("selection", time.perf_counter() - start)

        def unfinished() -> list[int]:
            return [
                row
                for row, request_id in enumerate(batch.request_ids)
                if _missing(batch, proposal, row) > 0 and request_id not in self.set_aside
            ]

        while rows := unfinished():
            # Each pass of level 2 adds a token of its own, hence one less to draft.
            wanted = [min(self.gamma, _missing(batch, proposal, r) - 1) for r in rows]
            sampling = batch.sampling.take(rows)
            self.noise.begin(
                sampling.seeds,
                [(batch.num_computed_tokens[r], len(proposal.token_ids[r])) for r in rows],
            )

            start = time.perf_counter()
            drafted = self.level1.draft(batch, proposal, rows, wanted, sampling, self.noise)
            drafted_at = time.perf_counter()
            logits = self.level2.forward(batch, proposal, rows, drafted.token_ids)
            forwarded_at = time.perf_counter()
            verified = verify(drafted.token_ids, drafted.probs, logits, sampling, self.noise)
            for row, tokens, probs in zip(rows, verified.token_ids, verified.probs):
                proposal.token_ids[row] += tokens
                if not greedy:
                    proposal.probs[row] += probs
            for i in drafted.nan_rows:
                self.level1.clean(batch.request_ids[rows[i]])
                self._set_aside(batch.request_ids[rows[i]], "level 1's (the draft's)")
            for i in verified.nan_rows:
                self.level2.clean(batch, rows[i])
                self._set_aside(batch.request_ids[rows[i]], "level 2's (the sparse target's)")
            self.counters.add_time("level 1", drafted_at - start)
            self.counters.add_time("level 2", forwarded_at - drafted_at)
            self.counters.add_time("verification", time.perf_counter() - forwarded_at)
            self.counters.num_level2_passes += 1
            self.counters.add_inner_round(drafted.token_ids, verified.num_accepted)
        self.counters.add_proposal(proposal.token_ids)
        return proposal

    def release(self, request_id: str) -> None:
        """Forgets a request that has left the engine."""
        self.set_aside.discard(request_id)
        self.level1.release(request_id)
        self.level2.release(request_id)

    def held_requests(self) -> dict[str, int]:
        """How many requests each level keeps something for."""
        return {
            "level 1": self.level1.num_requests,
            "level 2": len(self.level2.cache),
            "set aside": len(self.set_aside),
        }

    def _set_aside(self, request_id: str, whose: str) -> None:
        if request_id in self.set_aside:
            return
        self.set_aside.add(request_id)
        self.counters.num_nan_requests += 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it goes on without speculation, its output is "
                "not affected. Further requests are counted (vllm:triforce_nan_requests_total), "
                "not logged; check the model's weights and dtype.",
                whose,
                request_id,
            )


def _missing(batch: DraftBatch, proposal: Proposal, row: int) -> int:
    return batch.max_num_tokens[row] - len(proposal.token_ids[row])
