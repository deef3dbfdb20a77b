"""Level 3's test at given acceptance rates (``rejection_sample_method: synthetic``), on the host.

vLLM's CPU build has no such test. A rejected token is replaced by the target's most probable one,
for sampled requests too.
"""

import random

import torch

from vllm_triforce.config.synthetic import rates_by_place
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.runner_v1.acceptance import AcceptanceRecorder


class SyntheticTest(AcceptanceRecorder):
    """Accept drafts at given rates while vLLM's rejection sampler runs; record no probabilities.

    Args:
        rates: vLLM's, by place.
        direct_rate: that of a direct draft's tokens; None for ``rates``.
        batch: vLLM's input batch.
        seed: the engine's, so that all ranks accept alike.
    """

    def __init__(
        self, rates: list[float], direct_rate: float | None, batch, seed: int | None
    ) -> None:
        super().__init__()
        self._rates = rates_by_place(rates)
        self._direct = self._rates if direct_rate is None else [direct_rate] * len(rates)
        self._batch = batch
        self._random = random.Random(seed)
        self._routes: dict[str, str] = {}

    def note_routes(self, request_ids: list[str], routes: list[str]) -> None:
        """Keep the route of each request's last proposal."""
        self._routes.update(zip(request_ids, routes))

    def forget(self, request_id: str) -> None:
        """Drop a request's route."""
        self._routes.pop(request_id, None)

    def _sample(self, *args, **options) -> torch.Tensor:  # [batch_size, max_spec_len + 1], int32
        draft_token_ids, num_draft_tokens, max_spec_len, _, _, target_logits, bonus, _ = args
        best = target_logits.argmax(-1).tolist()
        drafts, result = draft_token_ids.tolist(), []
        for row, count in enumerate(num_draft_tokens):
            row_drafts, row_best = drafts[:count], [*best[:count], int(bonus[row])]
            drafts, best = drafts[count:], best[count:]
            is_direct = self._routes.get(self._batch.req_ids[row]) != HIERARCHICAL
            rates = self._direct if is_direct else self._rates
            accepts = [self._random.random() < rate for rate in rates[:count]]
            num = (*accepts, False).index(False)
            token_ids = [*row_drafts[:num], row_best[num]]
            result.append(token_ids + [-1] * (max_spec_len + 1 - len(token_ids)))
        return torch.tensor(result, dtype=torch.int32, device=target_logits.device)
