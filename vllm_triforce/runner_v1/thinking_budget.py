"""``thinking_token_budget`` on Model Runner V1: end reasoning as stock vLLM without speculation.

vLLM's state holder has separate rules for steps with several tokens, and its rows depend on whether
speculation is configured. Here vLLM's rules for a single token are applied to each accepted token
and each draft, so that no request depends on the proposals of others.
"""

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

# Same as in vLLM; larger than any logit.
_FORCED_LOGIT = 1e9


class PlainThinkingBudget(ThinkingBudgetStateHolder):
    """vLLM's state holder without speculation, evaluated after every draft token too."""

    def __init__(self, reasoning_config, max_num_reqs: int, device: torch.device) -> None:
        super().__init__(reasoning_config, max_num_reqs, 0, device, False)
        self._forced: dict[int, list[int | None]] = {}
        """Token forced after the output and the first 0, 1, ... drafts, by row of the batch."""

    def sync_batch(self, batch_update: BatchUpdate | None) -> None:
        """Update the state's rows to the batch's."""
        for _, row, direction in batch_update.moved if batch_update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                # vLLM would leave a finished request's state to a request without a budget.
                self._state.pop(row, None)
        super().sync_batch(batch_update)

    def update_state(
        self,
        output_token_ids: list[list[int]],
        spec_token_ids: list[list[int]] | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Advance each state over the output, and a copy of it over the drafts."""
        self._forced = {}
        for row, state in self._state.items():
            output = output_token_ids[row]
            self._advance(state, output)
            forced = [self._forced_token(state)]
            drafts = spec_token_ids[row] if spec_token_ids else []
            draft_state = dict(state)
            for count in range(1, len(drafts) + 1):
                self._step(draft_state, [*output, *drafts[:count]])
                forced.append(self._forced_token(draft_state))
            self._forced[row] = forced

    def apply_to_logits(
        self,
        logits: torch.Tensor,  # [num_reqs or num_draft_tokens, vocab_size]
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
            rows, tokens = torch.tensor(places).T
            logits[rows, tokens] = _FORCED_LOGIT
        return logits

    def _advance(self, state: dict, output: list[int]) -> None:
        """Advance the state over the tokens since the last step."""
        num_advanced = state.get("num_advanced")
        if num_advanced is None or num_advanced > len(output):
            # A resumed request, or one that lost tokens, may be within the forced string.
            state |= self._init_state_entry(state["prompt_tok_ids"], state["thinking_token_budget"])
            num_advanced = max(0, len(output) - len(self.think_end_token_ids))
            self._step(state, output[:num_advanced])
        for count in range(num_advanced + 1, len(output) + 1):
            self._step(state, output[:count])
        state["num_advanced"] = len(output)

    def _step(self, state: dict, output: list[int]) -> None:
        """Apply vLLM's rules for a step with one new token."""
        state["output_tok_ids"] = output
        state["force_index"] = []
        self._update_think_state(state)

    def _forced_token(self, state: dict) -> int | None:
        """Return the token that must come next, None if any may."""
        is_due = state["in_end"] and state["force_index"]
        return self.think_end_token_ids[state["end_count"]] if is_due else None

    @staticmethod
    def _find_last_sequence_index(target_list: list[int], token_ids: list[int]) -> int:
        """Search as vLLM does, but skip its slow loop if the first token does not occur."""
        if token_ids and token_ids[0] not in target_list:
            return -1
        return ThinkingBudgetStateHolder._find_last_sequence_index(target_list, token_ids)
