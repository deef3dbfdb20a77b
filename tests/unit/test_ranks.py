"""Promise: tensor parallel ranks launch the same, whenever each of them sees a NaN, and with any
number of threads."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.messages import RequestPlan, StepPlan, attach_plan, report_of
from vllm_triforce.runner_v1.acceptance import acceptance_probs
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sampling import SamplingRows
from vllm_triforce.runner_v1.sources.draft_model import DraftModel
from vllm_triforce.runner_v1.sources.source import Draft
from vllm_triforce.runner_v1.verification import verify
from vllm_triforce.runner_v2 import runner as module
from vllm_triforce.runner_v2.slots import Slots

ALL = RequestPlan(HIERARCHICAL, 6, 3)
NAMES = ["broken", "waiting"]
CPU = torch.device("cpu")


class Speculator:
    """The speculator over one slot; the logits of the slot's first owner have a NaN."""

    num_proposed = torch.zeros(2, dtype=torch.int32)
    draft_logits = None

    def __init__(self, slots: Slots) -> None:
        self.known_counters = SimpleNamespace(num_nan_requests=0)
        self.launched: dict[str, int] = {}
        self._slots = slots

    def propose(self, batch, draft_tokens) -> None:
        self.launched = {name: self._slots.take(name).index for name in batch.request_ids}

    def keeps_window(self, route: str) -> bool:
        return True

    def __getattr__(self, name: str):
        return lambda *args: None  # writes on the device


class Rows(list):
    """Request ids of a batch's rows, with their states."""

    def __init__(self, input_batch, plans, *sampled) -> None:
        super().__init__(input_batch.req_ids[row] for row in plans)
        self.request_ids, self.states = [*self], np.array(list(plans))


def a_rank(built, monkeypatch) -> module.RunnerAdapterV2:
    """Make the speculator without vLLM's base, over a build of our own."""
    flags = SimpleNamespace(
        decodes_plainly=np.zeros(2, dtype=bool), max_tokens=np.full(2, 128, dtype=np.int32)
    )

    def init(self, vllm_config, device, runner, config, draft_model) -> None:
        self.config, self.device, self.vllm_config = config, device, vllm_config
        self.max_num_reqs, self.num_speculative_steps, self.vocab_size = 2, 6, 100
        self.draft_tokens, self.draft_attn_layer_names = torch.zeros(2, 6), set()
        self.model = self.level2_model = None
        self.target_layers, self._runner = {}, runner
        self._handler = SimpleNamespace(set_proposals=lambda *args: None)

    monkeypatch.setattr(module.BaseAdapterV2, "__init__", init)
    monkeypatch.setattr(module.BaseAdapterV2, "draft_layers", {})
    for name, value in {
        "SpeculatorPartsV2": built,
        "install_request_listener": flags,
        "replace_rejection_sampler": None,
        "disable_recording_in_plain_graphs": None,
        "BatchReader": SimpleNamespace(read=Rows),
    }.items():
        monkeypatch.setattr(module, name, lambda *args, value=value: value)
    config = TriForceConfig(min_context=0).with_defaults(can_adapt=False, has_fixed_shapes=True)
    states = SimpleNamespace(req_id_to_index=dict.fromkeys(NAMES))
    runner = SimpleNamespace(req_states=states, block_tables=None, vllm_config=None)
    rank = module.RunnerAdapterV2(None, CPU, runner, config.resolve(16), None)
    rank.allocate(SimpleNamespace(num_blocks=9))
    return rank


STEP = SimpleNamespace(
    num_reqs=2,
    req_ids=NAMES,
    idx_mapping=torch.arange(2),
    idx_mapping_np=np.arange(2),
    is_prefilling_np=np.zeros(2, dtype=bool),
    num_draft_tokens_per_req=None,
    num_scheduled_tokens=np.ones(2, dtype=int),
    num_computed_prefill_tokens_np=np.full(2, 500),
    prefill_len_np=np.full(2, 400),
    seq_lens_cpu_upper_bound=torch.full((2,), 500),
)


def launches(sees_at: int, plans: list[StepPlan], monkeypatch) -> tuple[list, set]:
    """Run the steps of one rank.

    Args:
        sees_at: step after which the rank's copy of the counters has the NaN.

    Returns:
        The rows of each step with their slots, and requests reported as disabled.
    """
    slots = Slots(1)
    speculator = Speculator(slots)
    built = SimpleNamespace(
        speculator=speculator,
        slots=slots,
        adapters=None,
        hidden_states=None,
        logits_processing=None,
        tables=None,
        rows=SimpleNamespace(
            slot_disabled=torch.tensor([1]), outcomes=torch.ones(2, 4, dtype=torch.int32)
        ),
        recorder=SimpleNamespace(expect=lambda selection: None, without_recording=nullcontext),
    )
    rank = a_rank(built, monkeypatch)
    launched, disabled = [], set()
    for step, plan in enumerate(plans):
        attach_plan(scheduled := SimpleNamespace(), plan)
        speculator.launched = {}
        rank.begin_step(scheduled)
        speculator.known_counters.num_nan_requests = int(step >= sees_at)
        rank.propose(STEP, *[None] * 10)
        launched.append(speculator.launched)
        report = report_of(rank.end_step(SimpleNamespace(req_ids=NAMES)))
        disabled |= set(report.disabled) if report else set()
    return launched, disabled


@pytest.mark.parametrize("sees_at", [1, 3, 5])
def test_a_rank_that_sees_a_nan_later_launches_the_same(sees_at, monkeypatch):
    """All ranks release the slot in the step that the scheduler names."""
    plans = [StepPlan(n, dict.fromkeys(NAMES, ALL)) for n in range(3)]
    plans += [StepPlan(n, {"waiting": ALL}, ("broken",)) for n in range(3, 6)]
    first, disabled = launches(0, plans, monkeypatch)
    assert disabled == {"broken"}
    other, _ = launches(sees_at, plans, monkeypatch)
    assert first == other == [{"broken": 0}] * 3 + [{"waiting": 0}] * 3


class AllConfident:
    """Rule that ends no draft and notes what it is asked with."""

    def __init__(self) -> None:
        self.top_probs: list[float] = []

    def keeps(self, row: int, top_prob: float) -> bool:
        self.top_probs.append(top_prob)
        return True


def decided(logits: torch.Tensor, sampling: SamplingRows, num_threads: int) -> list:
    """Return all that a rank decides tokens, lengths and controller by, from gathered logits.

    Args:
        logits: [2, vocab_size].
    """
    torch.set_num_threads(num_threads)
    noise, rule, draft = InnerNoise(0, CPU), AllConfident(), Draft([[]], [[]])
    noise.begin([], [(0, 0)])
    if sampling.all_greedy:
        draft.probs = None
    DraftModel._sample(None, logits[:1].clone(), [0], sampling, noise, draft, rule)
    verified = verify(draft.token_ids, draft.probs, logits.flip(0), sampling, noise)
    probs = None if draft.probs is None else torch.stack(draft.probs[0])
    chances = acceptance_probs(torch.tensor([5]), probs, logits[1:], is_greedy=False)
    exported = [p.numpy().tobytes() for p in verified.probs[0]]
    return [draft.token_ids, rule.top_probs, verified.token_ids, exported, chances.tolist()]


@pytest.mark.parametrize(
    "temperature, top_p, num_seeds", [(0.0, None, 60), (1.0, None, 30), (0.8, 0.9, 10)]
)
def test_ranks_with_other_numbers_of_threads_decide_alike(temperature, top_p, num_seeds):
    """Torch splits some sums among threads, which changes their last bits."""
    num_threads = torch.get_num_threads()
    top_p = None if top_p is None else torch.tensor([top_p])
    sampling = SamplingRows(torch.tensor([temperature]), top_p=top_p)
    try:
        for seed in range(num_seeds):
            logits = 5 * torch.randn(2, 128_256, generator=torch.Generator().manual_seed(seed))
            one, *others = (decided(logits, sampling, threads) for threads in (1, 2, 3))
            assert all(other == one for other in others)
    finally:
        torch.set_num_threads(num_threads)
