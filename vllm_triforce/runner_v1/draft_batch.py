"""Input and output of Runner V1's speculator: requests to speculate on, and their proposals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_triforce.runner_v1.sampling import LogitsProcessing, SamplingRows

# In the place of the ids that stand for an image, audio or video in a prompt.
PLACEHOLDER = -1


@dataclass
class DraftBatch:
    """Requests to speculate on after a full pass. Lists have one entry per request."""

    request_ids: list[str]
    token_ids: list[np.ndarray]
    """[num_computed_tokens + 1], int32: prompt, output and the token just sampled; ``PLACEHOLDER``
    where the target reads something else than a token."""
    num_computed_tokens: list[int]
    """Tokens whose KV the full pass has written and accepted."""
    max_num_tokens: list[int]
    """Longest proposal that fits the lookahead slots; at least 1."""
    block_tables: list[list[np.ndarray]]
    """Allocated block ids per KV cache group and request."""
    sampling: SamplingRows
    logits_processors: list[LogitsProcessing | None] = field(default_factory=list)
    """None for requests that change no logits; empty if none does."""
    tenants: list[str | None] = field(default_factory=list)
    """Requests of a tenant may see each other's answers, requests of None nobody's."""
    # For the controller, which chooses before a batch is divided.
    num_plain_reqs: int = 0
    """Number of requests in the engine's step that cannot be speculated on."""
    is_greedy: list[bool] = field(default_factory=list)
    """True where level 3 verifies by argmax. Requests with a grammar are drafted greedily although
    level 3 samples."""

    def __len__(self) -> int:
        return len(self.request_ids)

    def context(self, proposal: "Proposal", row: int) -> np.ndarray:
        """Return a request's tokens and proposed tokens, [num_tokens], int32."""
        proposed_ids = proposal.token_ids[row]
        if not proposed_ids:
            return self.token_ids[row]
        return np.concatenate([self.token_ids[row], np.asarray(proposed_ids, dtype=np.int32)])

    def has_placeholders(self, row: int) -> bool:
        """True if a request's prompt has an image, audio or video."""
        return self.token_ids[row].min() == PLACEHOLDER

    def has_seed(self, row: int) -> bool:
        return bool(self.sampling.seeds) and self.sampling.seeds[row] is not None

    def process_logits(
        self,
        logits: torch.Tensor,  # [num_places, vocab_size]
        proposal: "Proposal",
        places: Iterable[tuple[int, list[int]]],
    ) -> torch.Tensor:  # [num_places, vocab_size], float32 if any request changes its logits
        """Process the logits of every place, maybe in place.

        Args:
            places: the row and the tokens drafted after its proposal.
        """
        if not any(self.logits_processors):
            return logits
        logits = logits.float()
        for place_logits, (row, draft) in zip(logits, places):
            if (processor := self.logits_processors[row]) is not None:
                processor(place_logits, [*proposal.token_ids[row], *draft])
        return logits

    def take(self, rows: list[int], max_num_tokens: list[int]) -> "DraftBatch":
        """Return the requests of ``rows`` with other maximum lengths."""

        def pick(values):
            return [values[row] for row in rows]

        return DraftBatch(
            pick(self.request_ids),
            pick(self.token_ids),
            pick(self.num_computed_tokens),
            max_num_tokens,
            [pick(tables) for tables in self.block_tables],
            self.sampling.take(rows),
            pick(self.logits_processors) if self.logits_processors else [],
            pick(self.tenants) if self.tenants else [],
        )


@dataclass
class Proposal:
    """Proposed tokens and the distribution that each was drawn from."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor | None]]
    """[vocab_size], float32, per request and token, None for a one-hot distribution; of no use for
    greedy requests, and maybe empty."""
    num_planned: list[int]
    """Number of tokens per request, each decided on before it is drawn."""
    routes: list[str] = field(default_factory=list)
    """Way of each request's tokens (``controller/routes.py``)."""

    @classmethod
    def empty(cls, num_reqs: int) -> "Proposal":
        return cls([[] for _ in range(num_reqs)], [[] for _ in range(num_reqs)], [0] * num_reqs)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, row: int, token_ids: list[int], probs: Sequence[torch.Tensor | None]) -> None:
        """Append tokens and copies of their distributions to a request's proposal."""
        self.token_ids[row] += token_ids
        # They may be rows of a pass, which would stay in memory as a whole.
        self.probs[row] += [None if row_probs is None else row_probs.clone() for row_probs in probs]
