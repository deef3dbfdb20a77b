"""Requests that vLLM refuses as soon as any speculation is configured are answered.

``SamplingParams._validate_spec_decode`` refuses ``min_p`` and ``logit_bias``, since vLLM's
rejection sampler of Model Runner V1 leaves them out. Ours (``worker/v1/rejection.py``) applies
them, and so does Model Runner V2 (``apply_sampling_params`` in vllm/v1/worker/gpu/sample/
sampler.py): a deployment that adds TriForce goes on answering what it answered before.
"""

import functools

from vllm_triforce.config.mark import is_triforce


def install() -> None:
    """Wraps the check; it falls through for any other speculative method."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode

    @functools.wraps(original)
    def _validate_spec_decode(self, speculative_config):
        if is_triforce(speculative_config):
            return
        original(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode
