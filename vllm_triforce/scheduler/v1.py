"""Drafts go from the worker to the scheduler with the step's output.

Once speculation is configured, vLLM's engine core asks the worker for drafts after every step,
those too in which nothing was speculated on (``EngineCore.post_step`` in vllm/v1/engine/core.py).
Where the worker is another process, as behind every server on the CPU, that is a message there and
back for each step. Model Runner V1 has made the drafts by the time it gives its output, so they go
along.

vLLM's scheduler for Model Runner V1: invents no drafts, and gets them with a step's output.
"""

from collections.abc import Collection

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.config.keys import METHOD
from vllm_triforce.core.eligibility import decodes_plainly, sampling_seed
from vllm_triforce.scheduler.grammar_masks import GrammarMaskMixin
from vllm_triforce.scheduler.lookahead import LookaheadMixin, PrefixCacheMixin
from vllm_triforce.scheduler.placeholders import drop_placeholders
from vllm_triforce.scheduler.stats import OutcomeStatsMixin

# Attribute of a ModelRunnerOutput: drafts, None where the step has none, and whether more may be
# made behind the next step.
_ATTRIBUTE = "triforce_drafts"


def attach_drafts(output, runner, expects_proposals: bool):
    """``output`` with the drafts that were made in its step."""
    # vLLM's empty output is one object for all.
    if output is not None and getattr(output, "req_ids", None):
        setattr(output, _ATTRIBUTE, (runner.take_draft_token_ids(), expects_proposals))
    return output


class DraftCarrierMixin:
    """Over a scheduler: takes the drafts out of a step's output."""

    has_drafts_of_step = False
    """Whether the step's drafts, or that it has none, are known already."""
    expects_proposals = True
    """Whether drafts may be made behind the next step."""

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.has_drafts_of_step = hasattr(model_runner_output, _ATTRIBUTE)
        if self.has_drafts_of_step:
            drafts, self.expects_proposals = getattr(model_runner_output, _ATTRIBUTE)
            if drafts is not None:
                self.update_draft_token_ids(drafts)
        return outputs


class TriForceScheduler(
    LookaheadMixin,
    DraftCarrierMixin,
    PrefixCacheMixin,
    OutcomeStatsMixin,
    GrammarMaskMixin,
    Scheduler,
):
    """Has drafts verified that were proposed, and no placeholders."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._min_context = self.vllm_config.additional_config[METHOD]["min_context"]

    def _update_after_schedule(self, scheduler_output) -> None:
        # None are expected; a newer vLLM may have other reasons to make some.
        drop_placeholders(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        names = scheduler_output.num_scheduled_tokens
        came_back = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._lend(
            scheduler_output,
            {name: self.num_spec_tokens for name in names if self._may_propose(name, came_back)},
        )

    def _may_propose(self, name: str, came_back: Collection[str]) -> bool:
        """The worker chooses behind the step; which steps it chooses in it has said before, of the
        batch as it was then. A request with a seed waits for no such step."""
        request = self.requests[name]
        return (
            (
                self.expects_proposals
                or not request.num_output_tokens
                or name in came_back
                or sampling_seed(request.sampling_params) is not None
            )
            and not request.is_prefill_chunk
            and request.num_computed_tokens >= self._min_context
            and not decodes_plainly(request.sampling_params)
        )
