"""Request parameters that Model Runner V2 does not keep."""

import numpy as np
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


def install_request_listener(runner) -> RequestFlags:
    """Add ``RequestFlags`` to a runner's sampler."""
    flags = RequestFlags(runner.max_num_reqs)
    runner.sampler.logits_processors.append(flags)
    return flags
