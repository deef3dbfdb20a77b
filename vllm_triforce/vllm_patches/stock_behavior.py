"""Patches that keep the behavior of stock vLLM although speculation is configured.

- Token budget: for ``draft_model``, vLLM's scheduler leaves one token of ``max_num_batched_tokens``
  free per request, because its drafter reads one token more than the step has. TriForce's levels
  have inputs of their own. Without that token, a prompt that just fits would need another step.
- Drafts: the engine core fetches drafts from the worker after every step. Model Runner V1's arrive
  with the step's output (``scheduler/v1.py``), so the round trip is skipped.
- Request parameters: vLLM refuses ``min_p`` and ``logit_bias`` with any speculation, because the
  rejection sampler of Model Runner V1 ignores them. Ours (``runner_v1/rejection.py``) applies them,
  and so does Model Runner V2 (``apply_sampling_params`` in vllm/v1/worker/gpu/sample/sampler.py).
- Sessions: a turn may end inside a run of accepted tokens. vLLM's scheduler then continues after
  the run (``_handle_stopped_request`` in vllm/v1/core/sched/scheduler.py). It would take the KV of
  discarded tokens for that of the next input, and keep the turn's last token.
"""

from vllm_triforce.config.request_args import request_limit
from vllm_triforce.vllm_patches.patch import patch

# Tag of a SpeculativeConfig, pickled with it, so the front end, the engine and the workers see it.
_TAG = "_is_triforce"


def mark(speculative_config) -> None:
    """Tag a ``SpeculativeConfig`` as TriForce's."""
    object.__setattr__(speculative_config, _TAG, True)


def is_triforce(speculative_config) -> bool:
    """True if the config is tagged as TriForce's, not another method's."""
    return getattr(speculative_config, _TAG, False)


@patch("vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting", "self")
def _reserve_no_slots(original):
    def max_num_new_slots_for_drafting(self) -> int:
        return 0 if is_triforce(self) else original(self)

    return max_num_new_slots_for_drafting


@patch("vllm.v1.engine.core:EngineCore.post_step", "self, model_executed")
def _skip_fetching_drafts(original):
    def post_step(self, model_executed):
        if not getattr(self.scheduler, "has_drafts_of_step", False):
            return original(self, model_executed)
        self.scheduler.has_drafts_of_step = False

    return post_step


@patch("vllm.sampling_params:SamplingParams._validate_spec_decode", "self, speculative_config")
def _support_all_sampling_params(original):
    def _validate_spec_decode(self, speculative_config):
        if is_triforce(speculative_config):
            request_limit(self)  # raises an error for bad extra_args
            return
        original(self, speculative_config)

    return _validate_spec_decode


@patch("vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request", "self, request")
def _keep_session_tokens(original):
    def _handle_stopped_request(self, request) -> bool:
        if request.resumable and is_triforce(self.vllm_config.speculative_config):
            # Without speculation all tokens are computed, except the last and those in flight.
            num_computed = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, num_computed)
        return original(self, request)

    return _handle_stopped_request
