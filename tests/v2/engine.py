"""Engines on Model Runner V2 and what the cases want to see of their insides."""

import os
from contextlib import contextmanager

from tests.conftest import Engines
from tests.inside import worker_of
from tests.one_process import inspect_models_here
from vllm_triforce.config import triforce_config

# The kernels that select take a second a pass in the interpreter. Cases that name their policy have
# them, or all with TRIFORCE_TEST_SELECTION_KERNELS=1; others select by the policy's score().
HAS_KERNELS = os.environ.get("TRIFORCE_TEST_SELECTION_KERNELS") == "1"


class EnginesV2(Engines):
    """Engines in Triton's interpreter, one at a time."""

    def __init__(self) -> None:
        super().__init__(keep=1)

    def get(self, model: str, triforce: dict, **arguments):
        from vllm.v1.sample.ops import topk_topp_sampler

        inspect_models_here()
        # Triton's interpreter cannot run the kernel for top-k and top-p; PyTorch's is exact too.
        topk_topp_sampler.HAS_TRITON = False
        has_kernels = HAS_KERNELS or "selection" in triforce
        triforce_config._PASS_KERNELS = ("retrieval",) if has_kernels else ()
        llm = super().get(model, triforce, **arguments)
        assert worker_of(llm).use_v2_model_runner
        return llm


def speculator_of(llm):
    return worker_of(llm).model_runner.speculator


@contextmanager
def uninformed_scheduler(llm):
    """The scheduler verifies ``num_speculative_tokens`` of every request, as an asynchronous one
    does, which the CPU cannot have: vLLM's own handler announces that many placeholders."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    runner = worker_of(llm).model_runner
    ours = runner.draft_tokens_handler
    runner.draft_tokens_handler = DraftTokensHandler(runner.device)
    try:
        yield
    finally:
        runner.draft_tokens_handler = ours
