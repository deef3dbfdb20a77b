"""Promise: level 3 is told, of each token that it verifies, what that very token was drawn from."""

from types import SimpleNamespace

import pytest
import torch

from vllm_triforce.runner_v1.batch import Proposal
from vllm_triforce.runner_v1.draft_probs import Check, ContractViolation, DraftProbsStore
from vllm_triforce.runner_v1.runner import RunnerAdapterV1
from vllm_triforce.runner_v1.sampling import InnerNoise, SamplingRows
from vllm_triforce.runner_v1.verification import verify

VOCAB = 8


def distribution(seed: int) -> torch.Tensor:
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def handed_up(check: Check = Check.RAISE, **proposals: list[int]) -> tuple[DraftProbsStore, dict]:
    """Export proposals with distributions of their own."""
    boundary, probs = DraftProbsStore(check=check), {}
    for number, (name, tokens) in enumerate(proposals.items()):
        probs[name] = [distribution(100 * number + place) for place in range(len(tokens))]
        boundary.export_proposal(name, tokens, probs[name], len(tokens))
    return boundary, probs


def test_each_token_has_one_row_in_any_batch():
    """A greedy request before a sampled one once shifted the rows."""
    boundary, probs = handed_up(sampled=[1, 2, 3], other=[4])
    rows = boundary.take(
        ["greedy", "sampled", "plain", "other"], [5, 3, 0, 1], [0] * 5 + [1, 2, 3, 4]
    )
    assert rows.shape == (9, VOCAB)
    assert torch.equal(rows[5:8], torch.stack(probs["sampled"]))
    assert torch.equal(rows[8], probs["other"][0])
    assert torch.equal(rows[:5], torch.eye(VOCAB)[[0] * 5]), "nothing is known of them: certain"


def test_a_request_that_waits_keeps_its_own():
    boundary, probs = handed_up(waiting=[1, 2], other=[3, 4])
    assert torch.equal(boundary.take(["other"], [2], [3, 4]), torch.stack(probs["other"]))
    boundary.export_proposal("other", [5], [distribution(7)], 1)
    rows = boundary.take(["other", "waiting"], [1, 2], [5, 1, 2])
    assert torch.equal(rows, torch.stack([distribution(7), *probs["waiting"]]))
    assert len(boundary) == 0


def test_a_proposal_that_is_cut_keeps_its_first_rows():
    boundary, probs = handed_up(one=[1, 2, 3])
    assert torch.equal(boundary.take(["one"], [2], [1, 2]), torch.stack(probs["one"][:2]))


def test_certain_tokens_have_one_hot_rows():
    boundary = DraftProbsStore(check=Check.RAISE)
    boundary.export_proposal("one", [6, 2], [None, distribution(1)], 2)
    rows = boundary.take(["one"], [2], [6, 2])
    assert torch.equal(rows[0], torch.eye(VOCAB)[6])
    boundary.export_proposal("one", [6, 2], [None, None], 2)
    assert boundary.take(["one"], [2], [6, 2]) is None


FAULTS = {
    "fewer tokens than were planned": ([1, 2], [distribution(0)] * 2, 3),
    "more tokens than were planned": ([1, 2], [distribution(0)] * 2, 1),
    "a row of q too few": ([1, 2], [distribution(0)], 2),
    "a row that sums to more than 1": ([1], [1.01 * distribution(0)], 1),
    "a token that could not be drawn": ([1], [torch.eye(VOCAB)[2]], 1),
    "not a number": ([1], [distribution(0) * float("nan")], 1),
}


@pytest.mark.parametrize("tokens, probs, planned", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_named_and_harmless(tokens, probs, planned):
    """Its tokens are verified as certain ones, which is right for any token."""
    with pytest.raises(ContractViolation, match="request bad"):
        DraftProbsStore(check=Check.RAISE).export_proposal("bad", tokens, probs, planned)
    found = []
    boundary = DraftProbsStore(lambda: found.append(1), Check.VALUES)
    boundary.export_proposal("good", [3], [distribution(5)], 1)
    boundary.export_proposal("bad", tokens, probs, planned)
    assert len(found) == 1
    rows = boundary.take(["bad", "good"], [len(tokens), 1], [*tokens, 3])
    assert torch.equal(rows[:-1], torch.eye(VOCAB)[tokens])
    assert torch.equal(rows[-1], distribution(5))


@pytest.mark.parametrize("check", [Check.SHAPES, Check.VALUES, Check.RAISE])
def test_other_tokens_than_drafted_are_found_by_every_check(check):
    boundary, _ = handed_up(check, bad=[1, 2], good=[3])
    if check is Check.RAISE:
        with pytest.raises(ContractViolation, match="request bad"):
            boundary.take(["bad", "good"], [2, 1], [1, 4, 3])
        return
    rows = boundary.take(["bad", "good"], [2, 1], [1, 4, 3])
    assert torch.equal(rows[:2], torch.eye(VOCAB)[[1, 4]])


def test_a_proposal_keeps_its_own_distributions_alone():
    """4 bytes per token of the vocabulary for each proposed token, whatever a round drew beside."""
    proposal, noise = Proposal.empty(3), InnerNoise(0)
    noise.begin([], [(0, 0)] * 3)
    drafts = [[1, 2, 3], [4], [5, 6]]
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    verified = verify(drafts, None, logits, SamplingRows(torch.ones(3)), noise)
    for row, tokens in enumerate(verified.token_ids):
        proposal.extend(row, tokens, verified.probs[row])
        storages = [probs.untyped_storage() for probs in proposal.probs[row]]
        num_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(num_bytes.values()) == 4 * VOCAB * len(tokens)


@pytest.mark.parametrize("has_nan", [False, True])
def test_a_nan_changes_no_distribution_of_the_tokens_before_it(has_nan):
    """What ended a proposal depends on its tokens, as what they were drawn from must not."""
    adapter = object.__new__(RunnerAdapterV1)
    adapter._draft_probs = DraftProbsStore(check=Check.RAISE)
    disabled = {"one"} if has_nan else set()
    adapter.speculator = SimpleNamespace(disabled_requests=disabled)
    batch = SimpleNamespace(request_ids=["one"], sampling=SamplingRows(torch.ones(1)))
    probs = [distribution(0), distribution(1)]
    adapter._export_proposal(batch, Proposal([[1, 2]], [probs], [5 if has_nan else 2]))
    assert torch.equal(adapter._draft_probs.take(["one"], [2], [1, 2]), torch.stack(probs))


def test_an_unknown_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TRIFORCE_CHECK", "yes")
    with pytest.raises(ValueError, match=r"VLLM_TRIFORCE_CHECK='yes'.*use 1"):
        DraftProbsStore()
