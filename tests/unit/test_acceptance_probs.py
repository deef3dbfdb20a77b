"""Promises of Runner V1's rejection sampler: the controller learns how likely the tokens of a
proposal were accepted; acceptance at given rates is asked for, is said to be no model's, and is at
the rates. tests/kernels/test_synthetic.py has V2's rates, tests/parity whole engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.calibration import assert_rate
from tests.refusals import engine_config, refused
from vllm_triforce.config.synthetic import extend_rates, rates_by_place
from vllm_triforce.controller.acceptance import (
    Acceptance,
    Rate,
    Rates,
    expected_by_length,
)
from vllm_triforce.controller.routes import HIERARCHICAL, Choice, SourceTraits
from vllm_triforce.runner_v1 import verification
from vllm_triforce.runner_v1.rejection import (
    CompleteRejectionSampler,
    SyntheticTest,
    acceptance_probs,
)
from vllm_triforce.runner_v1.sampling import InnerNoise, SamplingRows
from vllm_triforce.vllm_patches import engine_args
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel, fix_kernel_rebinding

CPU = torch.device("cpu")
VOCAB = 40


@pytest.fixture(scope="module", autouse=True)
def vllms_kernels():
    """Register vLLM's kernels as an engine on the CPU does."""
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


def distributions(draw: torch.Generator, count: int) -> torch.Tensor:
    return (2 * torch.randn(count, VOCAB, generator=draw)).softmax(-1)


def test_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])
    q = torch.tensor([[0.2, 0.6, 0.2], [0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    ids, is_greedy = torch.tensor([1, 0, 1, 1]), torch.tensor([False, False, True, True])
    found = acceptance_probs(ids, q, p.log(), is_greedy)
    assert found.tolist() == pytest.approx([0.5, 0.2, 0.0, 1.0])
    one_hot = acceptance_probs(ids[:2], None, p[:2].log(), is_greedy[:2])
    assert one_hot.tolist() == pytest.approx([0.3, 0.1])
    assert acceptance_probs(ids, None, p.log(), True).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_their_mean_is_the_overlap_of_the_distributions():
    draw = torch.Generator().manual_seed(3)
    p, q = distributions(draw, 1), distributions(draw, 1)
    ids = q.expand(20_000, -1).multinomial(1, generator=draw)[:, 0]
    many = torch.ones(len(ids), 1)
    found = acceptance_probs(ids, q * many, (p * many).log(), False)
    assert found.mean().item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.01)


def verify(sampler, counts, ids, q, logits, **parameters):
    """Run the rejection sampler over drafts, request after request."""
    it = iter(ids.tolist())
    metadata = SpecDecodeMetadata.make_dummy([[next(it) for _ in range(n)] for n in counts], CPU)
    bonus = metadata.cu_num_sampled_tokens - 1
    every = torch.arange(len(logits), dtype=torch.int32)
    metadata.bonus_logits_indices = bonus
    metadata.target_logits_indices = every[~torch.isin(every, bonus)]
    sampling = replace(sampling_metadata(), **parameters)
    return sampler(metadata, q, logits, sampling).sampled_token_ids, metadata.target_logits_indices


@pytest.mark.parametrize("top_p", [None, 0.7])
def test_the_rejection_sampler_records_each_rows_draft_tokens(top_p):
    """A greedy and two sampled requests, one of them without drafts."""
    fix_expand_kernel()
    draw = torch.Generator().manual_seed(1)
    counts, temperature = [3, 0, 4], torch.tensor([0.0, 1.0, 0.5])
    q = distributions(draw, 7)
    ids = q.multinomial(1, generator=draw)[:, 0]
    logits = torch.randn(10, VOCAB, generator=draw)
    sampler = CompleteRejectionSampler(Sampler(), None, CPU)
    _, places = verify(
        sampler,
        counts,
        ids,
        q,
        logits.clone(),
        all_greedy=False,
        temperature=temperature,
        top_p=None if top_p is None else torch.full((3,), top_p),
    )
    greedy, none, sampled = sampler.acceptance_by_row()
    agrees = logits[places[:3].long()].argmax(-1) == ids[:3]
    assert greedy == agrees.float().tolist() and none == []
    p = (logits[places[3:].long()] / 0.5).softmax(-1)
    if top_p is not None:
        ordered, order = p.sort(-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
        p /= p.sum(-1, keepdim=True)
    wanted = (p / q[3:]).gather(-1, ids[3:, None]).clamp(max=1)[:, 0]
    assert sampled == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_greedy_batch_records_which_tokens_are_the_likeliest():
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(6, VOCAB, generator=draw)
    ids = logits.argmax(-1)[[0, 1, 3, 4]]
    ids[1] = (ids[1] + 1) % VOCAB
    sampler = CompleteRejectionSampler(Sampler(), None, CPU)
    verify(sampler, [2, 2], ids, None, logits)
    assert sampler.acceptance_by_row() == [[1.0, 0.0], [1.0, 1.0]]


def test_vllms_function_is_back_after_the_test():
    before = rejection_sampler.rejection_sample
    test_the_rejection_sampler_records_each_rows_draft_tokens(None)
    assert rejection_sampler.rejection_sample is before


def test_probabilities_count_as_tests():
    """Tokens behind a rejected one say as much as those before it."""
    rate = Rate(0.5, weight=2.0, memory=1e9)
    rate.add(4, 1, [1.0, 0.2, 0.9, 0.9])
    assert rate.value == pytest.approx((1.0 + 3.0) / (2.0 + 4.0))
    assert (rate.accepted, rate.rejected) == pytest.approx((3.0, 1.0))


def test_they_count_for_level_2_alone():
    """A match goes on after a rejected token as if nothing had happened."""
    acceptance = Acceptance([SourceTraits("lookup", (0.5,))])
    before = acceptance.greedy.of("lookup", False, 0).value
    acceptance.observe_full_pass("a", Choice("lookup", 4, 0), 4, 0, [0.0, 1.0, 1.0, 1.0])
    assert acceptance.greedy.of("lookup", False, 0).value < before
    before = acceptance.greedy.level2.value
    acceptance.observe_full_pass("a", Choice(HIERARCHICAL, 8), 8, 0, [0.0] + 7 * [1.0])
    assert acceptance.greedy.level2.value > before - 0.03


@pytest.mark.parametrize(
    "num_drafted, num_accepted, tests",
    [
        (4, 0, [(0, 0), (0, 1), (0, 0), (0, 0)]),
        (4, 1, [(0, 0), (1, 0), (0, 1), (0, 0)]),
        (6, 5, [(0, 0), (1, 0), (1, 0), (3, 1)]),
        (2, 2, [(0, 0), (1, 0), (1, 0), (0, 0)]),
        (0, 0, [(0, 0)] * 4),
    ],
)
def test_an_accepted_token_moves_a_draft_up_a_class(num_drafted, num_accepted, tests):
    """A match of two tokens whose next one is accepted has become one of three."""
    classes = Rates.prior([SourceTraits("lookup", (0.1, 0.2, 0.3, 0.4))])
    assert classes.by_place("lookup", True, 1, 4) == [0.2, 0.3, 0.4, 0.4]
    for rate in classes.level1["lookup", True]:
        rate.memory = 1e9
    classes.add_draft("lookup", True, 1, num_drafted, num_accepted)
    rates = classes.level1["lookup", True]
    assert [(rate.accepted, rate.rejected) for rate in rates] == tests
    assert all(rate.accepted == rate.rejected == 0 for rate in classes.level1["lookup", False])


def test_expected_tokens_multiply_the_acceptances_of_all_places():
    expected = expected_by_length(np.array([[0.5, 0.5, 0.5], [1.0, 0.2, 0.0]]))
    assert expected == pytest.approx(np.array([[0, 0.5, 0.75, 0.875], [0, 1.0, 1.2, 1.2]]))
    assert expected_by_length(np.array([])).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [17, 4096, 128_256])
def test_ties_are_broken_as_stocks_greedy_sampler_breaks_them(dtype, vocab_size):
    """Stock breaks the ties of plain tokens by a kernel of its own on the CPU."""
    generator = torch.Generator().manual_seed(vocab_size)
    for num_tied in (1, 2, 5, vocab_size):
        logits = torch.randn(9, vocab_size, generator=generator).to(dtype)
        for row in logits:
            row[torch.randperm(vocab_size, generator=generator)[:num_tied]] = 8.0
        stocks = Sampler.greedy_sample(logits.float())
        assert torch.equal(stocks.view(-1), logits.float().argmax(-1))


def test_a_shorter_list_continues_by_its_last_tokens_rate():
    assert extend_rates([0.9], 3) == pytest.approx([0.9, 0.81, 0.729])
    assert extend_rates([0.8, 0.4], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert extend_rates([1.0, 0.0], 3) == [1.0, 0.0, 0.0] and extend_rates([0.5], 1) == [0.5]
    assert rates_by_place([0.8, 0.4, 0.0, 0.0]) == pytest.approx([0.8, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("rate", [0.0, 0.35, 0.75, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_level_2_accepts_at_the_rate(rate, temperature):
    """Drafts are what level 2 would never say, or always: row by row."""
    noise, num_rows, drafted = InnerNoise(3), 500, [[4] * 3, [7] * 3]
    noise.begin([], [(0, 0)] * num_rows)
    logits = torch.full((4 * num_rows, 11), -30.0)
    logits[:, 4] = 30.0
    sampling = SamplingRows(torch.full((num_rows,), temperature))
    found = verification.verify(drafted * (num_rows // 2), None, logits, sampling, noise, rate)
    accepted = sum(found.num_accepted)
    assert_rate(accepted, accepted + sum(n < 3 for n in found.num_accepted), rate)
    assert [len(ids) - 1 for ids in found.token_ids] == found.num_accepted


def test_a_nan_ends_a_proposal_at_any_rate():
    noise, logits = InnerNoise(3), torch.zeros(6, 11)
    noise.begin([], [(0, 0)] * 2)
    logits[1] = torch.nan
    found = verification.verify([[4] * 2] * 2, None, logits, SamplingRows(torch.zeros(2)), noise, 1)
    assert found.token_ids == [[4], [4, 4, 0]] and found.nan_rows == [0]


@pytest.mark.parametrize("all_greedy", [True, False])
def test_level_3_accepts_each_place_at_the_rate_of_its_route(all_greedy):
    num_reqs, rates, direct_rate = 1200, [0.9, 0.45, 0.36], 0.6
    names = [f"{i}" for i in range(num_reqs)]
    batch = type("Batch", (), {"req_ids": names})
    routes = dict(zip(names, [HIERARCHICAL, "prompt_lookup"] * (num_reqs // 2)))
    synthetic = SyntheticTest(rates, direct_rate, batch, routes, seed=0)
    sampler = CompleteRejectionSampler(Sampler(), None, CPU, synthetic)
    ids = torch.full((3 * num_reqs,), 7)
    logits = torch.zeros(4 * num_reqs, VOCAB)
    logits[:, 4] = 30.0
    more = {} if all_greedy else {"temperature": torch.ones(num_reqs)}
    sampled, _ = verify(sampler, [3] * num_reqs, ids, None, logits, all_greedy=all_greedy, **more)
    accepted = (sampled == 7).sum(1)
    assert torch.equal((sampled != -1).sum(1), accepted + 1), "and one token of the target's"
    for first, by_place in ((0, [0.9, 0.5, 0.8]), (1, [direct_rate] * 3)):
        counts = accepted[first::2]
        for place, rate in enumerate(by_place):
            assert_rate(int((counts > place).sum()), int((counts >= place).sum()), rate)
    assert sampler.acceptance_by_row() is None, "the controller learns from what was accepted"


GIVEN = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    "keys, named",
    [
        (GIVEN, ["synthetic_acceptance_rates=None", "from 0 to 1"]),
        (GIVEN | {"synthetic_acceptance_rates": 0.9}, ["=0.9"]),
        (GIVEN | {"synthetic_acceptance_rates": []}, ["=[]"]),
        (GIVEN | {"synthetic_acceptance_rates": [1.1]}, ["=[1.1]"]),
        (GIVEN | {"synthetic_acceptance_rates": [float("nan")]}, ["=[nan]"]),
        (GIVEN | {"synthetic_acceptance_rates": [0.4, 0.5]}, ["none above the one before it"]),
        ({"synthetic_acceptance_rates": [0.9]}, ["rates=[0.9] is not supported", "'standard'"]),
        ({"synthetic_level1_acceptance": 0.9}, ["=0.9 is not supported with rejection_sample"]),
        (
            GIVEN | {"synthetic_acceptance_rates": [0.9], "synthetic_level1_acceptance": 2},
            ["synthetic_level1_acceptance=2 is out of range"],
        ),
    ],
)
def test_rates_without_the_method_and_it_without_rates_are_refused(gqa_pair, keys, named):
    with refused(*named):
        engine_config(gqa_pair["target"], {"method": "triforce", **keys})


def test_a_start_warns_that_outputs_are_not_the_models(gqa_pair, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(engine_args.logger, "warning", lambda text, *args: warnings.append(text))
    config = engine_config(gqa_pair["target"], {"method": "triforce"})
    assert config.speculative_config.rejection_sample_method == "standard" and not warnings
    keys = GIVEN | {"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 3}
    config = engine_config(gqa_pair["target"], {"method": "triforce", **keys})
    assert config.speculative_config.synthetic_acceptance_rates == [0.5, 0.25, 0.125]
    (warning,) = warnings
    assert "Outputs are not the model's" in warning
