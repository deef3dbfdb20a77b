"""Patches that keep the behavior of stock vLLM although speculation is configured."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.config.request_args import request_limit
from vllm_triforce.vllm_patches import swaps
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
    """Leave ``max_num_batched_tokens`` to prompts.

    For ``draft_model``, vLLM's scheduler leaves one of these tokens free per request, because its
    drafter reads one token more than the step has. TriForce's levels have inputs of their own.
    Without that token, a prompt that just fits would need another step.
    """

    def max_num_new_slots_for_drafting(self) -> int:
        return 0 if is_triforce(self) else original(self)

    return max_num_new_slots_for_drafting


@patch("vllm.v1.engine.core:EngineCore.post_step", "self, model_executed")
def _skip_fetching_drafts(original):
    """Skip the round trip to the worker if the step's output brought the drafts.

    Those of Model Runner V1 do (``scheduler/v1.py``).
    """

    def post_step(self, model_executed):
        if not getattr(self.scheduler, "has_drafts_of_step", False):
            return original(self, model_executed)
        self.scheduler.has_drafts_of_step = False

    return post_step


@patch("vllm.sampling_params:SamplingParams._validate_spec_decode", "self, speculative_config")
def _support_all_sampling_params(original):
    """Accept ``min_p`` and ``logit_bias``, which Runner V1's own rejection sampler ignores.

    Ours (``runner_v1/rejection.py``) applies them, and so does Model Runner V2
    (``apply_sampling_params`` in vllm/v1/worker/gpu/sample/sampler.py).
    """

    def _validate_spec_decode(self, speculative_config):
        if is_triforce(speculative_config):
            request_limit(self)  # raises an error for bad extra_args
            return
        original(self, speculative_config)

    return _validate_spec_decode


@patch("vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request", "self, request")
def _keep_session_tokens(original):
    """Let a session's next turn begin where the last one ended.

    A turn may end inside a run of accepted tokens. vLLM's scheduler then continues after the run.
    It would take the KV of discarded tokens for that of the next input, and keep the turn's last
    token.
    """

    def _handle_stopped_request(self, request) -> bool:
        if request.resumable and is_triforce(self.vllm_config.speculative_config):
            # Without speculation all tokens are computed, except the last and those in flight.
            num_computed = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, num_computed)
        return original(self, request)

    return _handle_stopped_request


@contextmanager
def hidden_kv_connector() -> Iterator[None]:
    """Hide vLLM's KV connector from attention layers while levels 1 and 2 run.

    A connector (remote prefill, offloading, shared caches) loads a layer's KV before the full
    pass's attention and saves it afterwards, by the step's metadata (``maybe_transfer_kv_layer`` in
    vllm/model_executor/layers/attention/kv_transfer_utils.py). That metadata is still bound while
    drafts are made. Their passes run through the same layers and write provisional KV, which must
    not be saved under a request's name.
    """
    from vllm.model_executor.layers.attention import kv_transfer_utils

    if not kv_transfer_utils.has_kv_transfer_group():
        yield
        return
    with swaps.HAS_KV_TRANSFER_GROUP.during(kv_transfer_utils, lambda: False):
        yield
