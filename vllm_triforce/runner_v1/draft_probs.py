"""What level 3 is told of the tokens that it verifies: kept, checked and laid out in one place.

Level 3's test of a token (vLLM's rejection sampler; arXiv 2211.17192) is right if
1. there is one row of q for each drafted token, in the requests' order and each request's own;
2. q of the drafted token is above 0, and a row sums to 1;
3. a token that was certain has a one-hot row;
4. how many tokens a request hands up was fixed before the first was drawn.
A one-hot row is right whatever the token is, as long as nothing that the test draws went into it:
what it gives is distributed as the target's own (vLLM's own n-gram method rests on that). So where
something of this does not hold, the request's tokens are taken for certain ones: they are accepted
less often, and no output is bent.
"""

import os
from dataclasses import dataclass
from enum import Enum

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.triforce")

CHECK_VARIABLE = "VLLM_TRIFORCE_CHECK"
# Of the sum of a float32 distribution over a quarter of a million tokens.
_SUM_TOLERANCE = 1e-3


class Check(Enum):
    """How much is checked, by the environment variable VLLM_TRIFORCE_CHECK."""

    SHAPES = ""
    """Tokens, their number and order: lists on the host, next to nothing."""
    VALUES = "1"
    """The distributions too, which reads each once more."""
    RAISE = "raise"
    """As VALUES, and a fault ends the engine: for tests."""

    @classmethod
    def from_environment(cls) -> "Check":
        value = os.environ.get(CHECK_VARIABLE, "")
        try:
            return cls("" if value == "0" else value)
        except ValueError:
            raise ValueError(
                f"{CHECK_VARIABLE}={value!r} is not known; use 1 to check the distributions that "
                "are handed up, raise to end the engine at a fault, or leave it out"
            ) from None


class ContractViolation(AssertionError):
    """What was handed up could have bent a request's output."""


@dataclass
class _Proposal:
    token_ids: list[int]
    probs: list[torch.Tensor | None]
    """Per token [vocab_size], float32; None where it was certain."""


class DraftProbsStore:
    """Proposals of sampled requests, from where they are made to where level 3 verifies them.

    A proposal is kept by its request, since a request may wait a step or more before it is
    scheduled again. Those of greedy requests are not kept: only the argmax counts for them.

    Args:
        on_fault: called for each fault that was found.
    """

    def __init__(self, on_fault=lambda: None, check: Check | None = None) -> None:
        self._check = Check.from_environment() if check is None else check
        self._on_fault = on_fault
        self._proposals: dict[str, _Proposal] = {}

    def export_proposal(
        self,
        request_id: str,
        token_ids: list[int],
        probs: list[torch.Tensor | None],
        num_planned: int,
    ) -> None:
        """Keeps what was proposed for a request, instead of an earlier proposal.

        Args:
            probs: what each token was drawn from, [vocab_size]; None where it was certain.
            num_planned: tokens that were to be proposed, before any was drawn.
        """
        self._proposals.pop(request_id, None)
        if all(p is None for p in probs):
            return
        if len(token_ids) != num_planned:
            self._report(request_id, f"{len(token_ids)} tokens where {num_planned} were planned")
        elif len(probs) != len(token_ids):
            self._report(request_id, f"{len(probs)} rows of q for {len(token_ids)} tokens")
        elif self._check is Check.SHAPES or self._has_right_values(request_id, token_ids, probs):
            self._proposals[request_id] = _Proposal(token_ids, probs)

    def forget(self, request_id: str) -> None:
        """The request has no proposal (any more)."""
        self._proposals.pop(request_id, None)

    def take(
        self,
        request_ids: list[str],
        num_drafts: list[int],
        token_ids: list[int],
    ) -> torch.Tensor | None:  # [sum(num_drafts), vocab_size], float32
        """Rows of q for what is verified, one for each token; one-hot rows where it was certain.

        None where every token was, as vLLM has it for proposals without distributions.

        Args:
            num_drafts: of each request; fewer than were handed up where they were cut.
            token_ids: [sum(num_drafts)], one request's after the other's.
        """
        rows: list[torch.Tensor | None] = []
        for request_id, count in zip(request_ids, num_drafts):
            tokens = token_ids[len(rows) : len(rows) + count]
            rows += self._rows(request_id, tokens)
        if len(rows) != len(token_ids):
            self._report(None, f"{len(token_ids)} tokens for {len(rows)} drafts of the requests")
            return None
        if all(row is None for row in rows):
            return None
        dense = self._lay_out(rows, token_ids)
        return dense if self._belongs(dense, token_ids) else None

    def __len__(self) -> int:
        return len(self._proposals)

    @staticmethod
    def _lay_out(rows: list[torch.Tensor | None], token_ids: list[int]) -> torch.Tensor:
        first = next(row for row in rows if row is not None)
        dense = first.new_zeros(len(rows), len(first))
        for place, (token, row) in enumerate(zip(token_ids, rows)):
            if row is None:
                dense[place, token] = 1.0
            else:
                dense[place] = row
                rows[place] = None  # its memory is free as soon as it is copied
        return dense

    def _belongs(self, dense: torch.Tensor, token_ids: list[int]) -> bool:
        """Whether what goes to level 3 has a row for each token, which could give it."""
        if len(dense) != len(token_ids):
            self._report(None, f"{len(dense)} rows of q for {len(token_ids)} tokens")
            return False
        if self._check is Check.SHAPES:
            return True
        given = dense[torch.arange(len(dense)), torch.tensor(token_ids)]
        if bool((given > 0).all()):
            return True
        self._report(None, f"q gives the tokens {given.tolist()}")
        return False

    def _rows(self, request_id: str, tokens: list[int]) -> list[torch.Tensor | None]:
        proposal = self._proposals.pop(request_id, None)
        certain: list[torch.Tensor | None] = [None] * len(tokens)
        if proposal is None:
            return certain
        if proposal.token_ids[: len(tokens)] != tokens:
            self._report(request_id, f"{tokens} is verified where {proposal.token_ids} was drafted")
            return certain
        return proposal.probs[: len(tokens)]

    def _has_right_values(self, request_id: str, token_ids, probs) -> bool:
        for place, (token, row) in enumerate(zip(token_ids, probs)):
            if row is None:
                continue
            total = float(row.sum())
            if not abs(total - 1) < _SUM_TOLERANCE or not float(row[token]) > 0:
                found = f"q sums to {total} and gives the token {float(row[token])}"
                self._report(request_id, f"token {place} of {len(token_ids)}: {found}")
                return False
        return True

    def _report(self, request_id: str | None, what: str) -> None:
        whose = "a step" if request_id is None else f"request {request_id}"
        if self._check is Check.RAISE:
            raise ContractViolation(f"proposal of {whose}: {what}")
        self._on_fault()
        logger.error(
            "Proposal of %s: %s. Its tokens are verified as certain ones, which cannot bend the "
            "output; please report this (counted in vllm:triforce_boundary_faults_total).",
            whose,
            what,
        )
