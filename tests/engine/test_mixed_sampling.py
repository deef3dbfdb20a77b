"""Promise: sampled requests keep the target's distribution, whatever is in the batch beside them.

Oracle and power as in tests/joint.py. The requests that are in the way are of
another kind: greedy ones, whose proposals have no distributions, and ones with a grammar, whose
proposals the scheduler cuts at the first token that the grammar forbids.
"""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import triforce
from tests.inside import drive, worker_of
from tests.joint import (  # noqa: F401, exact, models and prompt are fixtures
    LETTERS,
    NUM_TOKENS,
    asked_joint,
    exact,
    models,
    prompt,
    pvalue,
)
from tests.outputs import greedy, run
from tests.parity.cases import TWELVE
from tests.parity.disturbing import watch
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

NUM_SAMPLES = 2400


def sampled(max_tokens: int = NUM_TOKENS, **params) -> SamplingParams:
    params = {"temperature": 1.0, "ignore_eos": True, **params}
    return SamplingParams(max_tokens=max_tokens, detokenize=False, **params)


ALLOWED = "bdfhj"


def test_sampled_with_a_grammar(engines, models, prompt, exact):  # noqa: F811
    """The draft goes straight to level 3 and knows nothing of the grammar: most proposals are cut,
    at a token that was drawn. Were its distributions handed up, the tokens after the cut would be
    told apart from those tested, and both would be biased."""
    keys = triforce(**TWELVE, model=models["draft"], levels="1,3")
    limits = dict(max_model_len=512, max_num_seqs=64)
    llm = engines.get(models["target"], keys, **limits, skip_tokenizer_init=False)
    grammar = StructuredOutputsParams(regex=f"[{ALLOWED}]{{20}}")
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, structured_outputs=grammar)
    before = counters_of(llm)
    with watch(worker_of(llm).model_runner.rejection_sampler, "forward") as calls:
        outputs = run(llm, [prompt] * NUM_SAMPLES, [params] * NUM_SAMPLES)
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted > 240 and counted.num_level3_rejections > 240
    assert counted.num_proposed > counted.num_level2_drafted + 240, "none was cut"
    allowed = [2 + LETTERS.index(letter) for letter in ALLOWED]
    joint = asked_joint(exact, prompt, {"temperature": 1.0, "allowed_token_ids": allowed})
    samples = np.array([output.outputs[0].token_ids for output in outputs])
    assert pvalue(samples, joint) > 1e-4
    assert all(draft_probs is None for (_, draft_probs, *_), _ in calls), "certain tokens only"


@pytest.mark.parametrize("scheduler", ["ours", "vllm.v1.core.sched.scheduler.Scheduler"])
def test_a_request_with_one_token_to_compute_has_no_drafts(engines, pair, scheduler, text):
    """Prompts of one token, and ones that are cached but for their last token, beside a request
    that speculates: vLLM's scheduler gives them drafts of -1, which its CPU kernel accepts by the
    last token's probability in the row before, and that request is biased to say the last token. A
    top-k of 1 leaves one token only, which stock vLLM's greedy answer is."""
    stock = engines.get(pair["target"])
    prompts = [[7], [11], text[:97], text[200:265]]  # three blocks of 32 and a token, and two
    only = [sampled(6, top_k=1)] * len(prompts)
    wanted = run(stock, prompts, [greedy(6)] * len(prompts))
    keys = triforce(retrieval_budget=192, num_speculative_tokens=4)
    chosen = {} if scheduler == "ours" else {"scheduler_cls": scheduler}
    llm = engines.get(pair["target"], keys, max_model_len=1024, **chosen)
    run(llm, prompts, only)  # they are cached from now on
    last = llm.llm_engine.model_config.get_vocab_size() - 1
    params = greedy(60)
    params.logit_bias = {last: 100.0}
    later = {4 + 8 * i: [(str(i), its, own)] for i, (its, own) in enumerate(zip(prompts, only))}
    found = drive(llm, {0: [("long", text[300:700], params)], **later})
    for number, output in enumerate(wanted):
        assert found[str(number)].outputs[0].token_ids == output.outputs[0].token_ids, number
    assert found["long"].outputs[0].token_ids == [last] * 60
