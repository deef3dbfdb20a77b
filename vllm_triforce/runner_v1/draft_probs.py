"""Draft probabilities for level 3: stored with the proposal, checked, and laid out for the test.

The test of a draft token (vLLM's rejection sampler; arXiv 2211.17192) is exact under this contract:

1. q has one row per draft token, in the order of the requests and of their tokens.
2. q of the draft token is above 0, and each row sums to 1.
3. A token that was not drawn from a distribution has a one-hot row.
4. The number of proposed tokens is fixed before the first is drawn.

A one-hot row is exact for any token, provided that the token does not depend on the random numbers
of the test (vLLM's n-gram method relies on this). So where the contract is violated, the request's
tokens get one-hot rows: fewer are accepted, and the output stays exact.
"""

import os
from enum import Enum

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.triforce")

CHECK_VARIABLE = "VLLM_TRIFORCE_CHECK"
# Tolerance of the sum of a float32 distribution over a quarter of a million tokens.
_SUM_TOLERANCE = 1e-3


class Check(Enum):
    """Extent of the checks, set by the environment variable VLLM_TRIFORCE_CHECK."""

    SHAPES = ""
    """Check tokens, their number and order: comparisons of lists, at next to no cost."""
    VALUES = "1"
    """Check the distributions too, which reads each once more."""
    RAISE = "raise"
    """Check as VALUES does and end the engine at a violation, for tests."""

    @classmethod
    def from_environment(cls) -> "Check":
        """Read the environment variable, or refuse its value."""
        value = os.environ.get(CHECK_VARIABLE, "")
        try:
            return cls("" if value == "0" else value)
        except ValueError:
            raise ValueError(
                f"{CHECK_VARIABLE}={value!r} is not known; use 1 to check the draft "
                "distributions, raise to end the engine at a violation, or leave it out"
            ) from None


class ContractViolation(AssertionError):
    """A proposal violates level 3's contract and could have biased a request's output."""


class DraftProbsStore:
    """Proposals of sampled requests, from level 2's draw to level 3's test.

    A proposal is stored by request id, since a request may wait some steps until it is scheduled
    again. Proposals of greedy requests are not stored: level 3 compares their argmax.

    Args:
        on_violation: called at each violation of the contract.
    """

    def __init__(self, on_violation=lambda: None, check: Check | None = None) -> None:
        self._check = Check.from_environment() if check is None else check
        self._on_violation = on_violation
        self._proposals: dict[str, tuple[list[int], list[torch.Tensor | None]]] = {}
        """Tokens and their distributions, [vocab_size], float32, None for one-hot, by request."""

    def export_proposal(
        self,
        request_id: str,
        token_ids: list[int],
        probs: list[torch.Tensor | None],
        num_planned: int,
    ) -> None:
        """Check and store a request's proposal, in place of an earlier one; see ``Proposal``."""
        self.forget(request_id)
        if all(p is None for p in probs):
            return
        if len(token_ids) != num_planned:
            self._report(request_id, f"{len(token_ids)} tokens where {num_planned} were planned")
        elif len(probs) != len(token_ids):
            self._report(request_id, f"{len(probs)} rows of q for {len(token_ids)} tokens")
        elif self._check is Check.SHAPES or self._are_valid(request_id, token_ids, probs):
            self._proposals[request_id] = token_ids, probs

    def forget(self, request_id: str) -> None:
        self._proposals.pop(request_id, None)

    def take(
        self, request_ids: list[str], num_drafts: list[int], token_ids: list[int]
    ) -> torch.Tensor | None:  # [sum(num_drafts), vocab_size], float32
        """Remove the step's proposals and return q, one row per draft token.

        None if every row would be one-hot: vLLM's convention for drafts without distributions.

        Args:
            num_drafts: number of draft tokens per request. It is below the proposal's length where
                the scheduler cut the proposal.
            token_ids: [sum(num_drafts)], draft tokens, request after request.
        """
        rows: list[torch.Tensor | None] = []
        for request_id, count in zip(request_ids, num_drafts):
            rows += self._rows(request_id, token_ids[len(rows) : len(rows) + count])
        if len(rows) != len(token_ids):
            self._report(None, f"{len(token_ids)} tokens for {len(rows)} drafts of the requests")
            return None
        if all(row is None for row in rows):
            return None
        first = next(row for row in rows if row is not None)
        q = first.new_zeros(len(rows), len(first))
        for place, (token, row) in enumerate(zip(token_ids, rows)):
            if row is None:
                q[place, token] = 1.0
            else:
                q[place] = row
                rows[place] = None  # free each row's memory once it is copied
        return q

    def __len__(self) -> int:
        return len(self._proposals)

    def _rows(self, request_id: str, token_ids: list[int]) -> list[torch.Tensor | None]:
        """Remove a request's proposal and return its rows of q, None for one-hot rows."""
        count = len(token_ids)
        drafted_ids, probs = self._proposals.pop(request_id, (token_ids, [None] * count))
        if drafted_ids[:count] == token_ids:
            return probs[:count]
        # Without the tokens, which are the user's.
        self._report(
            request_id,
            f"the {count} verified tokens are not the first of the {len(drafted_ids)} drafted ones",
        )
        return [None] * count

    def _are_valid(self, request_id: str, token_ids, probs) -> bool:
        """True if every row sums to 1 and gives its token a probability above 0."""
        for place, (token, row) in enumerate(zip(token_ids, probs)):
            if row is None:
                continue
            total = float(row.sum())
            if not abs(total - 1) < _SUM_TOLERANCE or not float(row[token]) > 0:
                values = f"q sums to {total} and gives the token {float(row[token])}"
                self._report(request_id, f"token {place} of {len(token_ids)}: {values}")
                return False
        return True

    def _report(self, request_id: str | None, violation: str) -> None:
        owner = "a step" if request_id is None else f"request {request_id}"
        if self._check is Check.RAISE:
            raise ContractViolation(f"proposal of {owner}: {violation}")
        self._on_violation()
        logger.error(
            "Proposal of %s: %s. Its tokens are verified as one-hot drafts, which keeps the output "
            "exact; please report this (counted in vllm:triforce_boundary_faults_total).",
            owner,
            violation,
        )
