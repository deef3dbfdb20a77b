"""EAGLE-3 head (arXiv 2503.01840) or MTP layer over a window of recent tokens."""

from vllm_triforce.cache.streaming import StateWindow
from vllm_triforce.config import read_config
from vllm_triforce.core.head import fusion_of, num_states
from vllm_triforce.runner_v1.hidden_states import HiddenStates
from vllm_triforce.runner_v1.sources.draft_model import DraftModel, Feed
from vllm_triforce.runner_v1.sources.source import Match

_ALWAYS = Match()


class Head(DraftModel):
    """Drafts with a head that reads the target's hidden states beside the tokens.

    The states of a prefix from the prefix cache are unknown, so the window begins after it. The
    same holds for tokens computed while more than ``max_speculating_seqs`` requests ran.
    """

    name = "head"
    prior_acceptance = (0.5,)

    def __init__(self, model, vllm_config, *args, **kwargs) -> None:
        super().__init__(model, vllm_config, *args, **kwargs)
        config, _ = read_config(vllm_config)
        self.states = HiddenStates(
            fusion_of(model),
            vllm_config.model_config.dtype,
            config.state_capacity,
            vllm_config.speculative_config.draft_model_config.get_hidden_size(),
            self.cache.num_free_slots,
        )
        """Filled by the runner, from full passes and from those of level 2."""

    def find_matches(self, batch, proposal, rows) -> list[Match | None]:
        return [_ALWAYS if batch.request_ids[row] in self.states else None for row in rows]

    def _new_window(self) -> StateWindow:
        _, num_recent, capacity = self._window_sizes
        return StateWindow(num_recent, capacity)

    def _advance(self, batch, proposal, row: int, num_drafts: int) -> Feed:
        request_id, token_ids = batch.request_ids[row], batch.context(proposal, row)
        window = self._windows.setdefault(request_id, self._new_window())
        assert isinstance(window, StateWindow)
        position, first = window.advance_to(
            token_ids,
            num_drafts,
            batch.num_computed_tokens[row],
            self.states.first_known(request_id),
        )
        states = self.states.take(request_id, first - 1, len(token_ids) - 1)
        # The states of placeholders are those of their images.
        return Feed(token_ids[first:].clip(min=0).tolist(), position, states)

    def _processed(self, logits, batch):
        """Make rows uniform that allow no token of the head's vocabulary.

        Such rows have no distribution. Drafts of any other are verified correctly.
        """
        if not batch.logits_processors:
            return logits
        has_none = logits.amax(-1, keepdim=True) == float("-inf")
        return logits.masked_fill(has_none, 0.0)

    def prepare_dummy(self, batch) -> None:
        config = self.model.config
        for request_id, num_computed in zip(batch.request_ids, batch.num_computed_tokens):
            width = getattr(config, "target_hidden_size", None) or config.hidden_size
            count = num_states(self._vllm_config)
            self.states.add_zeros(request_id, num_computed, count, width)

    @property
    def num_requests(self) -> int:
        return max(super().num_requests, len(self.states))

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.states.release(request_id)
