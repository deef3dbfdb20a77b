"""Patches that keep the behavior of stock vLLM although speculation is configured."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.config.request_args import request_limit
from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.cli_args import REGISTRY
from vllm_triforce.vllm_patches.patch import patch

# Tag of a SpeculativeConfig, pickled with it, so the front end, the engine and the workers see it.
_TAG = "_is_triforce"


def mark(speculative_config) -> None:
    object.__setattr__(speculative_config, _TAG, True)


def is_triforce(speculative_config) -> bool:
    return getattr(speculative_config, _TAG, False)


@patch(
    "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting",
    "self",
    why="for `draft_model` the scheduler keeps a token of a step's budget free per request, which "
    "TriForce does not use: a prompt that just fits would be read in two steps",
    until=REGISTRY,
)
def _reserve_no_slots(original, self) -> int:
    return 0 if is_triforce(self) else original(self)


@patch(
    "vllm.v1.engine.core:EngineCore.post_step",
    "self, model_executed",
    why="with speculation, the engine core fetches drafts from the worker's process after every "
    "step, with or without drafts. Model Runner V1's arrive with the step's output",
    until="drafts are part of the output",
)
def _skip_fetching_drafts(original, self, model_executed):
    if not getattr(self.scheduler, "has_drafts_of_step", False):
        return original(self, model_executed)
    self.scheduler.has_drafts_of_step = False


@patch(
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    "self, speculative_config",
    why="vLLM refuses `min_p` and `logit_bias` with any speculation; TriForce supports them, and "
    "checks its own `extra_args` here",
    until="vLLM's rejection sampler of Model Runner V1 applies them",
)
def _support_all_sampling_params(original, self, speculative_config):
    # Ours for Model Runner V1 (``runner_v1/rejection.py``) applies them, and so does V2
    # (``apply_sampling_params`` in vllm/v1/worker/gpu/sample/sampler.py).
    if is_triforce(speculative_config):
        request_limit(self)  # raises an error for bad extra_args
        return
    original(self, speculative_config)


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request",
    "self, request",
    why="if a session's turn ends inside a run of accepted tokens, vLLM starts the next turn from "
    "the KV of the discarded ones; see below",
    until="vLLM sets the count back to the tokens that are kept",
)
def _keep_session_tokens(original, self, request) -> bool:
    if request.resumable and is_triforce(self.vllm_config.speculative_config):
        # Without speculation all tokens are computed, except the last and those in flight.
        num_computed = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, num_computed)
    return original(self, request)


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
