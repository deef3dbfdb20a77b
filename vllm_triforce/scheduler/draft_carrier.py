"""Drafts go from the worker to the scheduler with the step's output.

Once speculation is configured, vLLM's engine core asks the worker for drafts after every step,
those too in which nothing was speculated on (``EngineCore.post_step`` in vllm/v1/engine/core.py).
Where the worker is another process, as behind every server on the CPU, that is a message there and
back for each step. Model Runner V1 has made the drafts by the time it gives its output, so they go
along.
"""

# Attribute of a ModelRunnerOutput: drafts, None where the step has none, and whether more may be
# made behind the next step.
_ATTRIBUTE = "triforce_drafts"


def attach_drafts(output, runner, expects_proposals: bool):
    """``output`` with the drafts that were made in its step."""
    # vLLM's empty output is one object for all.
    if output is not None and getattr(output, "req_ids", None):
        setattr(output, _ATTRIBUTE, (runner.take_draft_token_ids(), expects_proposals))
    return output


class TakesDrafts:
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
