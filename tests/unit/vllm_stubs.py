"""Builders of vLLM's objects that several unit tests need."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_triforce.vllm_patches import PATCHES


def wrap(name: str, original):
    """Wrap a function as the patch of ``OWNER.attribute`` wraps vLLM's."""
    return next(patch for patch in PATCHES if patch.name == name).wrap(original)


def sampling_metadata(**changes) -> SamplingMetadata:
    """Return the metadata of a greedy batch that asks for nothing else, with changes."""
    values = dict(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(0),
        presence_penalties=torch.zeros(0),
        repetition_penalties=torch.zeros(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SamplingMetadata(**{**values, **changes})
