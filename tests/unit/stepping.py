"""vLLM's scheduler for Runner V2 with our plans, stepped by hand: no device, one token a step."""

from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tests.simulation.engine import make_scheduler
from vllm_triforce.core.messages import REPORT

TOKEN, STOP, DRAFT = 7, 3, 8
BLOCK = 16


def scheduler(num_blocks: int, num_drafts: int | None = 32, **settings):
    """Make a scheduler with so many blocks beside the null block, whose requests all draft."""
    settings = {
        "is_asynchronous": False,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "adaptive": False,
        "min_context": 0,
        "num_speculative_tokens": num_drafts,
        **settings,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return make_scheduler(True, num_blocks=num_blocks + 1, block_size=BLOCK, **given)


def add(its, name: str, prompt: list[int], resumable=False, hasher=None, **params) -> None:
    params = {"max_tokens": 500, "ignore_eos": True, "stop_token_ids": [STOP], **params}
    its.add_request(
        Request(
            name,
            list(prompt),
            SamplingParams(**params),
            None,
            resumable=resumable,
            block_hasher=hasher,
        )
    )


def step(its, token: int = TOKEN, num_drafts: int = 32, make_report=None):
    """Run a step that gives each request a token: no draft is right.

    Args:
        num_drafts: most drafts of a request.
        make_report: takes the plan's number.
    """
    output = its.schedule()
    names, planned = list(output.num_scheduled_tokens), output.triforce_plan.proposing
    sampled = [[] if its.requests[name].is_prefill_chunk else [token] for name in names]
    places = {name: place for place, name in enumerate(names)}
    result = ModelRunnerOutput(names, places, sampled_token_ids=sampled)
    if make_report is not None:
        REPORT.attach_later(result, lambda: make_report(output.triforce_plan.number))
    its.update_from_output(output, result)
    drafts = [
        [DRAFT] * min(num_drafts, planned[n].num_tokens if n in planned else 0) for n in names
    ]
    its.update_draft_token_ids(DraftTokenIds(names, drafts))
    return output


def num_held(its, name: str) -> int:
    return len(its.kv_cache_manager.get_block_ids(name)[0])
