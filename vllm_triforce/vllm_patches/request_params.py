"""Requests that vLLM refuses as soon as any speculation is configured are answered.

``SamplingParams._validate_spec_decode`` refuses ``min_p`` and ``logit_bias``, since vLLM's
rejection sampler of Model Runner V1 leaves them out. Ours (``runner_v1/rejection.py``) applies
them, and so does Model Runner V2 (``apply_sampling_params`` in vllm/v1/worker/gpu/sample/
sampler.py): a deployment that adds TriForce goes on answering what it answered before.
"""

from vllm_triforce.config.tag import is_triforce
from vllm_triforce.vllm_patches.patch import Patch


def _support_all_sampling_params(original):
    def _validate_spec_decode(self, speculative_config):
        if is_triforce(speculative_config):
            return
        original(self, speculative_config)

    return _validate_spec_decode


PATCHES = [
    Patch(
        "vllm.sampling_params",
        "SamplingParams",
        "_validate_spec_decode",
        _support_all_sampling_params,
        ("self", "speculative_config"),
        why="vLLM refuses `min_p` and `logit_bias` beside any speculation; we answer them",
        until="vLLM's rejection sampler of Model Runner V1 applies them",
    )
]
