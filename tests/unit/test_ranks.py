"""Promise: tensor parallel ranks launch the same, whenever each of them sees a NaN."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller.routes import LEVELS
from vllm_triforce.core.eligibility import DisabledRequests
from vllm_triforce.core.plan import RequestPlan, StepPlan, attach_plan
from vllm_triforce.runner_v2 import runner as module
from vllm_triforce.runner_v2.reports import Reports
from vllm_triforce.runner_v2.routes import Routes
from vllm_triforce.runner_v2.slots import Slots

ALL = RequestPlan(LEVELS, 6, 3)
NAMES = ["broken", "waiting"]


class DeviceOfRank:
    """A device with a slot, whose first owner's logits have a NaN."""

    def __init__(self, slots: Slots, launched: list) -> None:
        self.known_counters = SimpleNamespace(num_nan_requests=0)
        self.num_proposed = torch.zeros(2, dtype=torch.int32)
        self._slots, self._launched = slots, launched

    def propose(self, batch, draft_tokens) -> None:
        slots = {name: self._slots.take(name).index for name in batch.request_ids}
        self._launched[-1] = slots

    def keeps_window(self, route: str) -> bool:
        return True

    def __getattr__(self, name: str):
        return lambda *args: None  # what only writes on the device


def launches(sees_at: int, plans: list[StepPlan]) -> tuple[list, list]:
    """
    Args:
        sees_at: the step behind which the rank's copy of the counters is there.

    Returns:
        The rows of each step with their slots, and what goes to the scheduler.
    """
    launched: list[dict[str, int]] = []
    slots = Slots(1)
    device = DeviceOfRank(slots, launched)
    config = (
        TriForceConfig(min_context=0)
        .with_defaults(can_adapt=False, has_fixed_shapes=True)
        .resolve(16)
    )
    built = SimpleNamespace(
        proposer=device,
        slots=slots,
        adapters=None,
        rows=SimpleNamespace(slot_disabled=torch.tensor([1]), outcomes=torch.ones(2, 4)),
        recorder=SimpleNamespace(expect=lambda selection: None, without_recording=nullcontext),
    )
    rank = module.TriForceSpeculatorV2.__new__(module.TriForceSpeculatorV2)
    torch.nn.Module.__init__(rank) if isinstance(rank, torch.nn.Module) else None
    rank._built, rank._reports = built, Reports(torch.device("cpu"))
    rank._flags = SimpleNamespace(decodes_plainly=np.zeros(2, dtype=bool))
    rank._routes = Routes(config, built, rank._flags)
    rank._disabled_requests, rank._num_nan_requests = DisabledRequests(), 0
    rank._has_proposal = np.zeros(2, dtype=bool)
    rank._runner = SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index=dict.fromkeys(NAMES)), block_tables=None
    )
    rank._report = SimpleNamespace(log_if_due=lambda *args: None)
    rank._handler = SimpleNamespace(set_proposals=lambda *args: None)
    rank.draft_tokens, rank.num_speculative_steps = torch.zeros(2, 6), 6
    rank._reader = SimpleNamespace(
        read=lambda input_batch, plans, *rest: NamedRows(
            [input_batch.req_ids[row] for row in plans], np.array(list(plans))
        )
    )
    step_of_both = SimpleNamespace(
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
    told = []
    for step, plan in enumerate(plans):
        attach_plan(scheduled := SimpleNamespace(), plan)
        launched.append({})
        rank.begin_step(scheduled)
        device.known_counters.num_nan_requests = int(step >= sees_at)
        rank.propose(step_of_both, None, None, None, None, None, None, None, None, None, None)
        told.append(rank._reports._disabled)
    return launched, told


class NamedRows:
    def __init__(self, request_ids: list[str], states: np.ndarray) -> None:
        self.request_ids = request_ids
        self.states = states

    def __len__(self) -> int:
        return len(self.request_ids)


@pytest.mark.parametrize("sees_at", [1, 3, 5])
def test_a_rank_that_sees_a_nan_later_launches_the_same(sees_at):
    """The scheduler, which hears of it from the first rank, tells all of them in one step; the
    slot has a new owner then."""
    plans = [StepPlan(n, dict.fromkeys(NAMES, ALL)) for n in range(3)]
    plans += [StepPlan(n, {"waiting": ALL}, ("broken",)) for n in range(3, 6)]
    first, told = launches(0, plans)
    assert told[0] == ("broken",)
    other, _ = launches(sees_at, plans)
    assert first == other == [{"broken": 0}] * 3 + [{"waiting": 0}] * 3
