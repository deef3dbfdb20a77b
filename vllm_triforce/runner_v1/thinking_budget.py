"""Forces the ends of reasoning that stock vLLM forces without speculation (Model Runner V1).

vLLM's holder of ``thinking_token_budget`` lays out its rows by whether speculation is configured,
and steps through several tokens by rules of their own. Here its plain rules are applied token by
token, to what was accepted and to each draft, so that no step depends on what others propose.
"""

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

# As vLLM's: larger than any logit.
_FORCED_LOGIT = 1e9


class PlainThinkingBudget(ThinkingBudgetStateHolder):
    """vLLM's state of requests with a budget, without speculation and at every draft token."""

    def __init__(self, reasoning_config, max_num_reqs: int, device: torch.device) -> None:
        super().__init__(reasoning_config, max_num_reqs, 0, device, False)
        self._forced: dict[int, list[int | None]] = {}
        """By row of the batch: the token forced behind the output and 0, 1, ... of its drafts."""

    def sync_batch(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch's rows."""
        for _, row, direction in batch_update.moved if batch_update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                # vLLM leaves the state of who has left to a request without a budget.
                self._state.pop(row, None)
        super().sync_batch(batch_update)

    def update_state(
        self,
        output_token_ids: list[list[int]],
        spec_token_ids: list[list[int]] | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Follow each request's output, then its drafts on a copy of its state."""
        self._forced = {}
        for row, state in self._state.items():
            output = output_token_ids[row]
            self._follow(state, output)
            forced = [self._forced_token(state)]
            drafts = spec_token_ids[row] if spec_token_ids else []
            ahead = dict(state)
            for count in range(1, len(drafts) + 1):
                self._step(ahead, [*output, *drafts[:count]])
                forced.append(self._forced_token(ahead))
            self._forced[row] = forced

    def apply_to_logits(
        self,
        logits: torch.Tensor,  # a row for each request, or for each draft token
        predict_bonus_token: bool,
        spec_token_ids: list[list[int]] | None,
    ) -> torch.Tensor:
        """Raise the forced tokens' logits, in place."""
        num_drafts = [len(drafts) for drafts in spec_token_ids or ()]
        places: list[tuple[int, int | None]] = []
        for row, forced in self._forced.items():
            if predict_bonus_token or not any(num_drafts):
                places.append((row, forced[-1]))
            else:
                start = sum(num_drafts[:row])
                places += ((start + i, token) for i, token in enumerate(forced[:-1]))
        if places := [(place, token) for place, token in places if token is not None]:
            rows, tokens = torch.tensor(places, device=logits.device).T
            logits[rows, tokens] = _FORCED_LOGIT
        return logits

    def _follow(self, state: dict, output: list[int]) -> None:
        """Step through the tokens that came since the last step."""
        known = state.get("num_followed")
        if known is None or known > len(output):
            # A request that comes back, or lost tokens, may be within the forced string.
            state |= self._init_state_entry(state["prompt_tok_ids"], state["thinking_token_budget"])
            known = max(0, len(output) - len(self.think_end_token_ids))
            self._step(state, output[:known])
        for count in range(known + 1, len(output) + 1):
            self._step(state, output[:count])
        state["num_followed"] = len(output)

    def _step(self, state: dict, output: list[int]) -> None:
        """Apply vLLM's rules for a step that has one new token."""
        state["output_tok_ids"] = output
        state["force_index"] = []
        self._update_think_state(state)

    def _forced_token(self, state: dict) -> int | None:
        is_due = state["in_end"] and state["force_index"]
        return self.think_end_token_ids[state["end_count"]] if is_due else None

    @staticmethod
    def _find_last_sequence_index(target_list: list[int], token_ids: list[int]) -> int:
        """As vLLM's, which looks at each place in Python, for each token of a step."""
        if token_ids and token_ids[0] not in target_list:
            return -1
        return ThinkingBudgetStateHolder._find_last_sequence_index(target_list, token_ids)
