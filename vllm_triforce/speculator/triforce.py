"""TriForce's proposal: the two inner levels, nested (paper, algorithm 1)."""

import time

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.speculator.draft_batch import DraftBatch, Proposal
from vllm_triforce.speculator.level1 import Level1
from vllm_triforce.speculator.retrieval import RetrievalLevel
from vllm_triforce.verification.inner import verify
from vllm_triforce.verification.noise import InnerNoise


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

    def propose(self, batch: DraftBatch) -> Proposal:
        """Proposes up to ``batch.max_num_tokens`` tokens for each request."""
        start = time.perf_counter()
        greedy = batch.sampling.all_greedy
        proposal = Proposal.empty(len(batch), greedy)
        self.level2.begin(batch)
        self.counters.add_time("selection", time.perf_counter() - start)

        while rows := [r for r in range(len(batch)) if _missing(batch, proposal, r) > 0]:
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
            self.counters.add_time("level 1", drafted_at - start)
            self.counters.add_time("level 2", forwarded_at - drafted_at)
            self.counters.add_time("verification", time.perf_counter() - forwarded_at)
            self.counters.num_level2_passes += 1
            self.counters.add_inner_round(drafted.token_ids, verified.num_accepted)
        self.counters.add_proposal(proposal.token_ids)
        return proposal

    def release(self, request_id: str) -> None:
        """Forgets a request that has left the engine."""
        self.level1.release(request_id)
        self.level2.release(request_id)


def _missing(batch: DraftBatch, proposal: Proposal, row: int) -> int:
    return batch.max_num_tokens[row] - len(proposal.token_ids[row])
