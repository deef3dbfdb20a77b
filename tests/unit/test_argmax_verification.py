"""Promise: the short greedy test accepts what vLLM's rejection sampler accepts."""

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_triforce.runner_v1.rejection import CompleteRejectionSampler

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def vllms_kernels():
    """Register vLLM's kernels as an engine on the CPU does."""
    from vllm.platforms import current_platform

    from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding

    fix_kernel_rebinding()
    current_platform.register_triton_kernel_overrides()


def sampling_metadata() -> SamplingMetadata:
    """Return the metadata of a greedy batch that asks for nothing else."""
    return SamplingMetadata(
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_accepts_the_tokens_that_vllm_accepts(seed, dtype):
    """Batches have no, right and wrong drafts, and equally large logits."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (5,), generator=draw).tolist()
    counts[seed % 5] = 6
    logits = torch.randint(0, 9, (sum(counts) + 5, 50), generator=draw).to(dtype)  # many ties
    best = iter(logits.float().argmax(-1).tolist())
    drafted = []
    for count in counts:
        tokens = [next(best) for _ in range(count)]
        next(best)
        wrong = torch.rand(count, generator=draw) < 0.3
        drafted.append([(t + 1) % 50 if w else t for t, w in zip(tokens, wrong.tolist())])
    metadata = SpecDecodeMetadata.make_dummy(drafted, CPU)
    bonus = metadata.cu_num_sampled_tokens - 1
    every = torch.arange(len(logits), dtype=torch.int32)
    metadata.bonus_logits_indices = bonus
    metadata.target_logits_indices = every[~torch.isin(every, bonus)]
    arguments = metadata, None, logits, sampling_metadata()
    wanted = RejectionSampler(Sampler(), None, CPU)(*arguments).sampled_token_ids
    found = CompleteRejectionSampler(Sampler(), None, CPU)(*arguments).sampled_token_ids
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [17, 100, 4096, 128_256])
def test_ties_are_broken_as_stocks_greedy_sampler_breaks_them(dtype, vocab_size):
    """Stock breaks ties by a kernel of its own on the CPU."""
    generator = torch.Generator().manual_seed(vocab_size)
    for num_tied in (1, 2, 5, vocab_size):
        logits = torch.randn(9, vocab_size, generator=generator).to(dtype)
        for row in logits:
            row[torch.randperm(vocab_size, generator=generator)[:num_tied]] = 8.0
        stocks = Sampler.greedy_sample(logits.float())
        assert torch.equal(stocks.view(-1), logits.float().argmax(-1))
