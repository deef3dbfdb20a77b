"""Where Model Runner V2 looks for a proposal: its tokens, their logits and their number."""

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

# Stands where nothing was proposed; see ProposalStore.
PAD_TOKEN = 0


class ProposalStore:
    """Draft tokens of the last batch, and draft logits per request slot.

    The full pass may verify more tokens than were proposed: where the scheduler learns nothing
    of the proposals (asynchronous scheduling), it always verifies ``num_speculative_tokens``.
    What was not proposed is therefore PAD_TOKEN, *drawn with certainty*: its draft logits are
    one-hot, so the outer test accepts it with the probability that the target gives it and
    otherwise draws from the rest, which is exact. V2's own placeholder, -1, will not do: the
    full pass would look up its embedding.

    Args:
        draft_tokens: [max_num_reqs, num_speculative_tokens], int64, in the order of the batch.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size], float32, by request
            slot, filled with -inf. The rejection sampler divides them by the request's
            temperature and applies nothing else (top-k and so on are for the target's).
    """

    def __init__(self, draft_tokens: torch.Tensor, draft_logits: torch.Tensor) -> None:
        self.draft_tokens = draft_tokens
        self.draft_logits = draft_logits
        draft_logits[..., PAD_TOKEN] = 0
        self.num_proposed = np.zeros(len(draft_logits), dtype=np.int64)
        """[max_num_reqs], by request slot."""
        self._num_distributions = np.zeros(len(draft_logits), dtype=np.int64)

    def store(
        self,
        slots: np.ndarray,  # [num_reqs], the batch's request slots
        token_ids: list[list[int]],  # per request, maybe empty
        probs: list[list[torch.Tensor]],  # per request and token [vocab_size]; empty if greedy
        temperatures: np.ndarray,  # [num_reqs]
    ) -> torch.Tensor:  # [num_reqs, num_speculative_tokens], int64
        padded = np.full((len(slots), self.draft_tokens.shape[1]), PAD_TOKEN, dtype=np.int64)
        for row, slot in enumerate(slots):
            padded[row, : len(token_ids[row])] = token_ids[row]
            self.num_proposed[slot] = len(token_ids[row])
            self._store_distributions(int(slot), probs[row], float(temperatures[row]))
        result = self.draft_tokens[: len(slots)]
        result.copy_(torch.from_numpy(padded))
        return result

    def _store_distributions(self, slot, probs, temperature: float) -> None:
        fresh, stale = len(probs), int(self._num_distributions[slot])
        if fresh:
            stacked = torch.stack(probs)
            # The rejection sampler's division by the temperature gives back log(probs).
            self.draft_logits[slot, :fresh, : stacked.shape[-1]] = stacked.log() * temperature
        if stale > fresh:
            self.draft_logits[slot, fresh:stale] = float("-inf")
            self.draft_logits[slot, fresh:stale, PAD_TOKEN] = 0
        self._num_distributions[slot] = fresh


class ProposedTokensHandler(DraftTokensHandler):
    """Tells the scheduler which tokens were proposed for each request, maybe none.

    vLLM's own announces ``num_speculative_tokens`` placeholders for every request.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.proposed: list[list[int]] = []
        """Per request of the last batch."""

    def set_draft_tokens(self, input_batch, draft_tokens) -> None:
        self.req_ids = input_batch.req_ids

    def get_draft_tokens(self) -> DraftTokenIds:
        return DraftTokenIds(self.req_ids, [list(tokens) for tokens in self.proposed])
