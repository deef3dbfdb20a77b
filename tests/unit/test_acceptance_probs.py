"""Promises of Runner V1's rejection sampler: the controller learns how likely the tokens of a
proposal were accepted; acceptance at given rates is asked for, and is said to be no model's.
tests/parity has the rates of whole engines, tests/kernels/test_synthetic.py those of V2."""

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.refusals import engine_config, refused
from vllm_triforce.config.synthetic import extend_rates, rates_by_place
from vllm_triforce.controller.acceptance import Acceptance, Rate, Rates
from vllm_triforce.controller.routes import HIERARCHICAL, Choice, SourceTraits
from vllm_triforce.runner_v1.rejection import CompleteRejectionSampler, acceptance_probs
from vllm_triforce.vllm_patches import engine_args
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel, fix_kernel_rebinding

CPU = torch.device("cpu")
VOCAB = 40


@pytest.fixture(scope="module", autouse=True)
def vllms_kernels():
    """Register vLLM's kernels as an engine on the CPU does."""
    fix_kernel_rebinding()
    current_platform.register_triton_kernel_overrides()


def test_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])
    q = torch.tensor([[0.2, 0.6, 0.2], [0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    ids, is_greedy = torch.tensor([1, 0, 1, 1]), torch.tensor([False, False, True, True])
    found = acceptance_probs(ids, q, p.log(), is_greedy)
    assert found.tolist() == pytest.approx([0.5, 0.2, 0.0, 1.0])
    one_hot = acceptance_probs(ids[:2], None, p[:2].log(), is_greedy[:2])
    assert one_hot.tolist() == pytest.approx([0.3, 0.1])
    assert acceptance_probs(ids, None, p.log(), True).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_the_rejection_sampler_records_each_rows_draft_tokens():
    """A greedy and two sampled requests, one of them without drafts."""
    fix_expand_kernel()
    draw = torch.Generator().manual_seed(1)
    q = (2 * torch.randn(7, VOCAB, generator=draw)).softmax(-1)
    ids = q.multinomial(1, generator=draw)[:, 0]
    logits = torch.randn(10, VOCAB, generator=draw)
    metadata = SpecDecodeMetadata.make_dummy([ids[:3].tolist(), [], ids[3:].tolist()], CPU)
    places = torch.tensor([0, 1, 2, 5, 6, 7, 8], dtype=torch.int32)
    metadata.target_logits_indices = places
    metadata.bonus_logits_indices = torch.tensor([3, 4, 9], dtype=torch.int32)
    sampling = SamplingMetadata(
        temperature=torch.tensor([0.0, 1.0, 0.5]),
        all_greedy=False,
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
    sampler = CompleteRejectionSampler(Sampler(), None, CPU)
    sampler(metadata, q, logits.clone(), sampling)
    greedy, none, sampled = sampler.acceptance_by_row()
    assert greedy == (logits[:3].argmax(-1) == ids[:3]).float().tolist() and none == []
    p = (logits[5:9] / 0.5).softmax(-1)
    wanted = (p / q[3:]).gather(-1, ids[3:, None]).clamp(max=1)[:, 0]
    assert sampled == pytest.approx(wanted.tolist(), abs=1e-5)


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
    acceptance.observe_full_pass(
        "a", Choice("lookup", 4, match_class=0), 4, 0, [0.0, 1.0, 1.0, 1.0]
    )
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
