"""Choose the rows of a batch that propose, and the route of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.plan import RequestPlan, StepPlan, fixed_plan
from vllm_triforce.runner_v2.build import SpeculatorBuild
from vllm_triforce.runner_v2.request_flags import RequestFlags


@dataclass
class Routes:
    """Assigns rows to routes, by the scheduler's plan."""

    config: ResolvedConfig
    built: SpeculatorBuild
    flags: RequestFlags

    def route_batch(
        self, input_batch, plan: StepPlan | None, max_tokens: int
    ) -> dict[str, dict[int, RequestPlan]]:
        """Group the rows that propose by route, each with its plan.

        The result must be the same on all tensor parallel ranks: it may not depend on how far a
        rank's device is.

        Args:
            plan: None if the scheduler makes none: then every eligible request gets a fixed plan.
            max_tokens: limit of a proposal.
        """
        routes: dict[str, dict[int, RequestPlan]] = {}
        kept_windows, slots = set(), self.built.slots
        num_free = slots.num_free
        for row, request_id, request_plan in self._eligible_rows(input_batch, plan, max_tokens):
            if request_id not in slots:
                if not num_free:
                    continue
                num_free -= 1
            routes.setdefault(request_plan.route, {})[row] = replace(
                request_plan, num_tokens=min(request_plan.num_tokens, max_tokens)
            )
            if self.built.proposer.keeps_window(request_plan.route):
                kept_windows.add(request_id)
        slots.invalidate_windows(set(input_batch.req_ids) - kept_windows)
        return routes

    def _eligible_rows(
        self, input_batch, plan: StepPlan | None, max_tokens: int
    ) -> Iterator[tuple[int, str, RequestPlan]]:
        """Yield (row, request id, plan) of rows that decode, are long enough and have a plan.

        The host has upper bounds of the lengths; the device checks them again.
        """
        if not max_tokens or (plan is not None and not plan.proposing):
            return
        fixed = fixed_plan(self.config, max_tokens)
        num_reqs = input_batch.num_reqs
        scheduled = input_batch.num_scheduled_tokens[:num_reqs]
        num_read = input_batch.num_computed_prefill_tokens_np[:num_reqs] + scheduled
        decodes = num_read >= input_batch.prefill_len_np[:num_reqs]
        max_lens = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        states = input_batch.idx_mapping_np[:num_reqs]
        is_eligible = decodes & ~self.flags.decodes_plainly[states]
        is_eligible &= max_lens >= self.config.min_context
        for row in np.flatnonzero(is_eligible[: self.config.max_batch]).tolist():
            request_id = input_batch.req_ids[row]
            request_plan = fixed if plan is None else plan.proposing.get(request_id)
            if request_plan is not None:
                yield row, request_id, request_plan
