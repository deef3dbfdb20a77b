"""Promise: on Runner V1 the full pass's logits of drafts, and of the token behind them, are changed
by what each request asks as the plain sampler changes them behind the same tokens."""

import random
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.sampler import Sampler

from tests.unit.vllm_stubs import sampling_metadata
from vllm_triforce.runner_v1.rejection import CompleteRejectionSampler

VOCAB_SIZE, DEVICE = 23, torch.device("cpu")
PROCESSORS = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
ASKED: list[dict] = [
    {},
    dict(allowed_token_ids=[1, 2, 4, 9]),
    dict(_bad_words_token_ids=[[9], [1, 2], [2, 4, 1]]),
    dict(repetition_penalty=1.3, frequency_penalty=0.2),
    dict(min_tokens=6, stop_token_ids=[5, 11]),
    dict(logit_bias={3: 2.0, 8: -4.0}),
    dict(
        allowed_token_ids=[1, 2, 4, 11],
        min_tokens=8,
        stop_token_ids=[11],
        _bad_words_token_ids=[[1, 4]],
        presence_penalty=0.5,
        logit_bias={4: 3.0},
    ),
]


def metadata(params, prompts, outputs, drafts):
    """Make the metadata of a batch as the runner does."""
    count = len(params)
    processors = [kind(None, DEVICE, False) for kind in PROCESSORS]
    added = [(i, params[i], prompts[i], outputs[i]) for i in range(count)]
    for processor in processors:
        processor.update_state(BatchUpdate(count, [], added, []))
    forbidden = torch.zeros(count, VOCAB_SIZE, dtype=torch.bool)
    for row, its in zip(forbidden, params):
        if its.allowed_token_ids:
            row.fill_(True)[its.allowed_token_ids] = False
    longest = max(map(len, prompts))

    def numbers(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(its, name)) for its in params])

    penalties = [numbers(f"{kind}_penalty") for kind in ("frequency", "presence", "repetition")]
    none = torch.tensor([0.0, 0.0, 1.0]).expand(count, 3)
    return sampling_metadata(
        temperature=torch.ones(count),
        all_greedy=False,
        all_random=True,
        no_penalties=torch.equal(torch.stack(penalties).T, none),
        prompt_token_ids=torch.tensor([p + [VOCAB_SIZE] * (longest - len(p)) for p in prompts]),
        frequency_penalties=penalties[0],
        presence_penalties=penalties[1],
        repetition_penalties=penalties[2],
        output_token_ids=outputs,
        allowed_token_ids_mask=forbidden if forbidden.any() else None,
        bad_words_token_ids={
            i: its.bad_words_token_ids for i, its in enumerate(params) if its.bad_words_token_ids
        },
        logitsprocs=LogitsProcessors(processors),
        spec_token_ids=drafts,
    )


def test_drafts_and_what_follows_are_judged_as_the_plain_sampler_would():
    draw = random.Random(0)
    plain = Sampler()
    sampler = CompleteRejectionSampler(plain, None, DEVICE)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.choice([1, 2, 4, 7, 9]) for _ in range(draw.randint(least, most))]

    num_seen = 0
    for _ in range(60):
        params = [SamplingParams(**draw.choice(ASKED)) for _ in range(draw.randint(1, 6))]
        prompts = [tokens(1, 5) for _ in params]
        outputs = [tokens(0, 6) for _ in params]
        drafts = [tokens(0, 4) for _ in params]
        for its, output, own in zip(params, outputs, drafts):
            if len(output) < its.min_tokens:  # as RunnerBatch.max_proposal_len() cuts it
                del own[max(0, its.min_tokens - len(output) - 1) :]
        if not any(drafts):
            continue
        batch = metadata(params, prompts, outputs, drafts)
        lengths = [len(own) for own in drafts]
        logits = [torch.randn(length + 1, VOCAB_SIZE) for length in lengths]
        of_drafts = sampler.apply_logits_processors(
            torch.cat([its[:-1] for its in logits]),
            batch,
            SimpleNamespace(num_draft_tokens=lengths),
        ).split(lengths)
        last = torch.stack([its[-1] for its in logits])
        of_last = plain.apply_logits_processors(last, batch, True)
        for i, own in enumerate(drafts):
            found = torch.cat([of_drafts[i], of_last[i : i + 1]])
            for place, right in enumerate(logits[i]):
                behind = metadata([params[i]], [prompts[i]], [outputs[i] + own[:place]], [[]])
                right = plain.apply_logits_processors(right[None].clone(), behind, False)[0]
                torch.testing.assert_close(found[place], right)
                num_seen += 1
    assert num_seen > 400
