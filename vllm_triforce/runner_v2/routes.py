"""Which rows of a batch propose something, and by which route."""

from dataclasses import replace

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.plan import RequestPlan, StepPlan, fixed_plan
from vllm_triforce.runner_v2.build import SpeculatorBuild
from vllm_triforce.runner_v2.request_flags import RequestFlags


class Routes:
    """One runner's."""

    def __init__(self, config: ResolvedConfig, built: SpeculatorBuild, facts: RequestFlags) -> None:
        self._config = config
        self._built = built
        self._facts = facts

    def route_batch(
        self, input_batch, plan: StepPlan | None, most: int
    ) -> dict[str, dict[int, RequestPlan]]:
        """For each route that is taken, the rows that take it and their parts in the plan.

        Tensor parallel ranks must find the same: nothing here may depend on when a rank's own
        device is done.

        Args:
            plan: None where the scheduler makes none: then all that can do the same.
            most: tokens of a proposal at most.
        """
        fixed = fixed_plan(self._config, most) if most else None
        routes: dict[str, dict[int, RequestPlan]] = {}
        windowed = set()
        for row, its in self._with_slots(self._able(input_batch, plan, fixed)):
            name = input_batch.req_ids[row]
            routes.setdefault(its.route, {})[row] = replace(
                its, num_tokens=min(its.num_tokens, most)
            )
            if self._built.proposer.keeps_window(its.route):
                windowed.add(name)
        self._built.slots.invalidate_windows(set(input_batch.req_ids) - windowed)
        return routes

    def _able(
        self, input_batch, plan: StepPlan | None, fixed: RequestPlan | None
    ) -> list[tuple[int, str, RequestPlan]]:
        """Rows that decode, are long enough and have something to propose, and whose they are.

        Lengths are what the host knows: upper bounds. The device looks again.
        """
        if fixed is None or (plan is not None and not plan.proposing):
            return []
        num_reqs = input_batch.num_reqs
        scheduled = input_batch.num_scheduled_tokens[:num_reqs]
        read = input_batch.num_computed_prefill_tokens_np[:num_reqs] + scheduled
        decodes = read >= input_batch.prefill_len_np[:num_reqs]
        longest = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        states = input_batch.idx_mapping_np[:num_reqs]
        is_able = decodes & ~self._facts.decodes_plainly[states]
        is_able &= longest >= self._config.min_context
        found = []
        for row in np.flatnonzero(is_able).tolist():
            name = input_batch.req_ids[row]
            its = fixed if plan is None else plan.proposing.get(name)
            if its is not None and row < self._config.max_batch:
                found.append((row, name, its))
        return found

    def _with_slots(
        self, able: list[tuple[int, str, RequestPlan]]
    ) -> list[tuple[int, RequestPlan]]:
        """Those that have a slot, or can get one."""
        slots = self._built.slots
        num_free, found = slots.num_free, []
        for row, name, its in able:
            if name not in slots:
                if not num_free:
                    continue
                num_free -= 1
            found.append((row, its))
        return found
