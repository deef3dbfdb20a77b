"""Promise: acceptance at given rates is asked for, is said to be no model's, and is at the rates.

On Model Runner V1; tests/kernels/test_synthetic.py has V2's, tests/parity whole engines.
"""

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from tests.calibration import assert_rate
from tests.refusals import engine_config, refused
from tests.unit.test_acceptance_probs import VOCAB, verify, vllms_kernels  # noqa: F401
from vllm_triforce.config.synthetic import extend_rates, rates_by_place
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.runner_v1 import verification
from vllm_triforce.runner_v1.rejection import CompleteRejectionSampler, SyntheticTest
from vllm_triforce.runner_v1.sampling import InnerNoise, SamplingRows
from vllm_triforce.vllm_patches import engine_args

CPU = torch.device("cpu")


def test_a_shorter_list_continues_by_its_last_tokens_rate():
    assert extend_rates([0.9], 3) == pytest.approx([0.9, 0.81, 0.729])
    assert extend_rates([0.8, 0.4], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert extend_rates([1.0, 0.0], 3) == [1.0, 0.0, 0.0] and extend_rates([0.5], 1) == [0.5]
    assert rates_by_place([0.8, 0.4, 0.0, 0.0]) == pytest.approx([0.8, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("rate", [0.0, 0.35, 0.75, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_level_2_accepts_at_the_rate(rate, temperature):
    """Drafts are what level 2 would never say, or always: row by row."""
    noise, num_rows, drafted = InnerNoise(3, CPU), 500, [[4] * 3, [7] * 3]
    noise.begin([], [(0, 0)] * num_rows)
    logits = torch.full((4 * num_rows, 11), -30.0)
    logits[:, 4] = 30.0
    sampling = SamplingRows(torch.full((num_rows,), temperature))
    found = verification.verify(drafted * (num_rows // 2), None, logits, sampling, noise, rate)
    accepted = sum(found.num_accepted)
    assert_rate(accepted, accepted + sum(n < 3 for n in found.num_accepted), rate)
    assert [len(ids) - 1 for ids in found.token_ids] == found.num_accepted


def test_a_nan_ends_a_proposal_at_any_rate():
    noise, logits = InnerNoise(3, CPU), torch.zeros(6, 11)
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
