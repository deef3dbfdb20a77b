"""The engine core does not ask for drafts that came with the step's output.

Once speculation is configured, it asks the worker for drafts after every step
(``EngineCore.post_step`` in vllm/v1/engine/core.py): a message there and back
(``scheduler/v1.py``).
"""

from vllm_triforce.vllm_patches.patch import Patch


def _unless_they_came(original):
    def post_step(self, model_executed):
        if not getattr(self.scheduler, "has_drafts_of_step", False):
            return original(self, model_executed)
        self.scheduler.has_drafts_of_step = False

    return post_step


PATCHES = [
    Patch(
        "vllm.v1.engine.core",
        "EngineCore",
        "post_step",
        _unless_they_came,
        ("self", "model_executed"),
        why="once speculation is configured, the engine core asks the worker for drafts after "
        "every step: a message there and back between two processes, in steps without speculation "
        "too. Model Runner V1's go with the step's output",
        until="drafts are part of the output",
    )
]
