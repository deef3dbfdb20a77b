"""What Model Runner V2 does not keep of requests: parameters, and ids that stand for images."""

from collections.abc import Iterable

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from vllm_triforce.config.keys import MAX_NUM_SPECULATIVE_TOKENS
from vllm_triforce.core.limits import proposal_limit


class RequestFlags(LogitsProcessor):
    """Records flags of each request; a logits processor that changes no logits."""

    def __init__(self, max_num_reqs: int) -> None:
        self.has_grammar = np.zeros(max_num_reqs, dtype=bool)
        self.max_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        """Longest proposal; 0 for a request that decodes plainly."""

    def add_request(self, req_idx: int, sampling_params) -> bool:
        self.has_grammar[req_idx] = sampling_params.structured_outputs is not None
        self.max_tokens[req_idx] = proposal_limit(sampling_params, MAX_NUM_SPECULATIVE_TOKENS)
        return False

    def apply(self, logits, ctx):
        return logits


class Placeholders:
    """Requests with an image, audio or video, and the token ids that stand for these.

    ``in`` tells if a request has one.
    """

    def __init__(self, runner) -> None:
        cache = runner.encoder_cache
        self._features = {} if cache is None else cache.mm_features
        self._device = runner.device
        self._ids: set[int] = set()
        self._is_placeholder: torch.Tensor | None = None
        """[largest id + 2], bool, of all requests so far; None before the first."""

    def __contains__(self, request_id: str) -> bool:
        return bool(self._features.get(request_id))

    def add(self, new_requests: Iterable) -> None:
        """Read vLLM's data of requests that join."""
        num_ids = len(self._ids)
        for request in new_requests:
            for place in (feature.mm_position for feature in request.mm_features):
                token_ids = np.array(request.prefill_token_ids[place.offset :][: place.length])
                is_embed = slice(None) if place.is_embed is None else place.is_embed.numpy()
                self._ids.update(token_ids[is_embed].tolist())
        if len(self._ids) > num_ids:
            table = torch.zeros(max(self._ids) + 2, dtype=torch.bool)
            table[list(self._ids)] = True
            self._is_placeholder = table.to(self._device, non_blocking=True)

    def drop_from(self, token_ids: torch.Tensor) -> None:
        """Replace ids that stand for an image by -1, without waiting for the device."""
        if (table := self._is_placeholder) is not None:
            token_ids.masked_fill_(table[token_ids.clamp(0, len(table) - 1).long()], -1)


def install_request_listener(runner) -> RequestFlags:
    """Add ``RequestFlags`` to a runner's sampler."""
    flags = RequestFlags(runner.max_num_reqs)
    runner.sampler.logits_processors.append(flags)
    return flags
