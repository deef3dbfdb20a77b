"""Promise: `vllm serve` with TriForce answers as stock vLLM does, and counts what it does.

One server for all tests here, with the soak's settings: a worker process, an engine process and
an API server, and a cache that is too small for the load. Its worker is killed at the end.
"""

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from itertools import accumulate, chain

import openai
import pytest

from tests import soak
from tests.generation import assert_same_tokens, generate
from tests.serving import MODEL, change, serve
from vllm_triforce import cli
from vllm_triforce.metrics.counters import COUNTERS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    # Fixed lengths: what is counted by hand must not depend on times.
    fixed = {"log_interval": 5, "adaptive": False, "min_context": 256}
    keys = json.dumps(soak.KEYS | fixed)
    with serve(pair["target"], log, *soak.SERVER, *soak.TRIFORCE, keys) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


GREEDY = dict(model=MODEL, temperature=0, max_tokens=40)
IDS = dict(return_token_ids=True, ignore_eos=True, add_special_tokens=False)


def check(stock, prompts, found) -> None:
    wanted = generate(stock, prompts, max_tokens=40)
    for prompt, w, f in zip(prompts, wanted, found, strict=True):
        assert_same_tokens(stock, prompt, w, f)


def test_the_doctor_reads_the_server(server, client, text, capsys):
    """All since the start, and between two readings; the address with and without ``/v1``."""
    client.completions.create(prompt=[text[:2000]] * 2, extra_body=IDS, **GREEDY)
    assert cli.main(["doctor", "--url", f"{server.address}/v1", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["model"] == MODEL and model["generated_tokens"] >= 80
    assert model["levels"]["num_proposals"] > 0 < model["levels"]["time_seconds"]["level 2"]
    assert 0 < model["accepted_share"] < 1 < model["levels"]["mean_acceptance_length"]
    assert model["levels"]["break_even_tokens"] is None  # lengths are fixed
    assert cli.main(["doctor", "--url", server.address, "--seconds", "0.1"]) == 0
    assert "generated           0 tokens" in capsys.readouterr().out


ONE_ANSWER = dict(temperature=1.0, n=2, logprobs=2)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_streamed_choices(client, stock, text, chat, interval):
    """By choice, chunks add up to the answer that is not streamed, which is stock's: tokens, text,
    numbers, usage."""
    arguments = GREEDY | ONE_ANSWER | dict(extra_body=IDS | dict(top_k=1, stream_interval=interval))
    if chat:
        content = stock.get_tokenizer().decode(text[:800])
        arguments |= dict(messages=[{"role": "user", "content": content}])
        arguments |= dict(logprobs=True, top_logprobs=2)
        ask = client.chat.completions.create
    else:
        arguments |= dict(prompt=text[:800])
        ask = client.completions.create
    whole = ask(**arguments)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(stream=True, stream_options=usage, **arguments)
    prompt = whole.prompt_token_ids if chat else whole.choices[0].prompt_token_ids
    check(stock, [prompt] * 2, [choice.token_ids for choice in whole.choices])
    assert last.choices == []
    for told in (last.usage, whole.usage):
        assert (told.prompt_tokens, told.completion_tokens) == (len(prompt), 80)
    assert sum(len(chunk.choices) for chunk in chunks) == len(chunks)
    for wanted in whole.choices:
        own = [chunk for chunk in chunks if chunk.choices[0].index == wanted.index]
        pieces = [chunk.choices[0] for chunk in own]
        tokens = [list(getattr(piece, "token_ids", None) or []) for piece in pieces]
        assert [*chain(*tokens)] == wanted.token_ids
        assert [chunk.usage.completion_tokens for chunk in own] == [*accumulate(map(len, tokens))]
        sizes = [len(its) for its in tokens if its]
        assert all(size >= interval for size in sizes[1:-1]) and max(sizes) > interval, sizes
        texts = [(piece.delta.content if chat else piece.text) or "" for piece in pieces]
        said = wanted.message.content if chat else wanted.text
        assert "".join(texts) == said
        assert not chat or said == stock.get_tokenizer().decode(wanted.token_ids)
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
        assert pieces[-1].finish_reason == wanted.finish_reason
        found = [numbers_of(piece.logprobs) for piece in pieces if piece.logprobs]
        assert [*chain(*found)] == pytest.approx(numbers_of(wanted.logprobs), abs=1e-3)


def numbers_of(logprobs) -> list[float]:
    """Log-probabilities of a choice or a chunk of it, as chat or completions have them."""
    if hasattr(logprobs, "content"):
        return [its.logprob for its in logprobs.content]
    return logprobs.token_logprobs


def run_async(server, work):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{server.address}/v1", api_key="none", max_retries=0
        ) as client:
            return await work(client)

    return asyncio.run(main())


def test_clients_that_leave(server, stock, text):
    """Twelve leave in mid-proposal; those beside them get stock's answer, all memory is free. The
    step that runs when a client leaves is in neither vLLM's figures nor TriForce's."""
    before = settled(server)
    leaving = [text[i * 50 : i * 50 + 300 + 40 * i] for i in range(12)]
    staying = [text[i * 70 : i * 70 + 400] for i in range(4)]

    async def leave(client, prompt, chunks):
        stream = await client.completions.create(
            prompt=prompt, stream=True, extra_body=IDS, **(GREEDY | {"max_tokens": 1000})
        )
        for _ in range(chunks):
            await anext(stream)
        await stream.close()

    async def work(client):
        stay = [
            client.completions.create(prompt=prompt, extra_body=IDS, **GREEDY) for prompt in staying
        ]
        gone = [leave(client, prompt, i % 4 + 1) for i, prompt in enumerate(leaving)]
        return (await asyncio.gather(*stay, *gone))[: len(stay)]

    answers = run_async(server, work)
    check(stock, staying, [answer.choices[0].token_ids for answer in answers])
    soak.check_nothing_is_kept(server)
    counted = change(before, settled(server))
    # vLLM counts no request that a client left: four, and the one that looks for leaks.
    assert counted["vllm:request_success_total"] == 4 + 1
    assert counted["vllm:triforce_proposals_total"] > 12
    vllms, ours = figures_of(counted)
    assert vllms == ours
    # The tokens that were handed out, and maybe some that nobody read any more.
    assert counted["vllm:generation_tokens_total"] >= 16 + ours["num_accepted_draft_tokens"]


def test_a_request_turns_speculation_off_or_limits_it(client, stock, text):
    def answer(**xargs):
        found = client.completions.create(
            prompt=text[:300], extra_body=IDS | {"vllm_xargs": xargs}, **GREEDY
        )
        check(stock, [text[:300]], [found.choices[0].token_ids])
        return found.metrics and found.metrics["speculative_decoding"]

    assert answer()["num_draft_tokens"] > 0
    assert answer(triforce=False)["num_spec_steps"] == 0
    limited = answer(triforce_num_speculative_tokens=2)
    assert 0 < limited["num_draft_tokens"] <= 2 * 40 and limited["mean_acceptance_length"] <= 3
    with pytest.raises(openai.BadRequestError, match='Use "triforce": false to decode'):
        answer(triforce="off")


def test_metrics_of_a_run_that_is_known_beforehand(server, client, text):
    """Everything is accepted where level 2's budget (256) covers the context, so all can be
    counted by hand: one token from the prefill, then four proposals of six, each followed by a
    token of the full pass's own.
    """
    before = server.metrics()
    answer = client.completions.create(
        prompt=text[:256], extra_body=IDS, **(GREEDY | {"max_tokens": 29})
    )
    after = settled(server)
    assert 'vllm:triforce_level2_accepted_tokens_total{engine="0",model_name="target"}' in after
    for part in ("selection", "level_1", "level_2", "verification"):
        assert any(f'part="{part}"' in name for name in after)
    counted = change(before, after)
    of_vllm = {"num_drafts": 4, "num_draft_tokens": 24, "num_accepted_tokens": 24}
    ours = {"proposals": 4, "proposed_tokens": 24, "level3_steps": 4, "level3_rejections": 0}
    ours |= {"level2_draft_tokens": 24, "level2_accepted_tokens": 24}
    for kind, wanted in (("spec_decode", of_vllm), ("triforce", ours)):
        assert {name: counted[f"vllm:{kind}_{name}_total"] for name in wanted} == wanted
    by_place = [
        value
        for name, value in counted.items()
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    ]
    assert by_place == [4] * 6
    rounds = counted["vllm:triforce_inner_rounds_total"]
    assert counted["vllm:triforce_level1_accepted_tokens_total"] + rounds == 24
    assert counted["vllm:triforce_propose_seconds_total"] > 0
    assert answer.metrics["speculative_decoding"] == {
        "mean_acceptance_length": 7.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 0, 0, 4],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 24,
        "num_draft_tokens": 24,
        "num_spec_tokens": 6,
        "per_step_accepted": [6] * 4,
        "per_step_drafted": [6] * 4,
    }


def test_metrics_agree_with_the_worker_and_with_the_answers(server, client, text):
    """Rejections included: the worker's own counters, vLLM's, and each answer's, are one sum."""
    before, worker_before = server.metrics(), server.rpc("triforce_counters")
    prompts = [text[i * 300 : i * 300 + 700 + 100 * i] for i in range(4)]
    spec = []
    for prompt in prompts:
        for temperature in (0, 1.0):
            answer = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=30, temperature=temperature, extra_body=IDS
            )
            spec.append(answer.metrics["speculative_decoding"])
    counted = change(before, settled(server))
    worker = change(*({name: counts[name] for name in COUNTERS} for counts in (
        worker_before, server.rpc("triforce_counters"))))  # fmt: skip
    for field, counter in COUNTERS.items():
        is_time = counter.unit == "seconds"  # each message has whole microseconds
        exported = counted[f"vllm:triforce_{counter.metric}_total"]
        assert worker[field] == pytest.approx(exported, rel=0, abs=1e-3 * is_time), field
    assert worker["num_level3_rejections"] > 0 and worker["num_nan_requests"] == 0
    sums = {
        name: sum(one[name] for one in spec)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    }
    assert [sums] * 2 == figures_of(counted)
    assert "KV fetch" not in server.text(), "our counters were taken for vLLM's"
    assert "TriForce metrics: Mean acceptance length" in server.text()


def settled(server) -> dict[str, float]:
    """The metrics, once nothing runs and nothing is counted any more."""
    before: dict[str, float] = {}
    for _ in range(50):
        after = server.metrics()
        counted = {name: value for name, value in after.items() if name.startswith("vllm:")}
        if counted == before and not after["vllm:num_requests_running"]:
            return after
        before = counted
        time.sleep(0.2)
    raise AssertionError("something is still counted")


def figures_of(counted: dict[str, float]) -> list[dict[str, float]]:
    """What vLLM's metrics and TriForce's own say of full passes that verified a proposal."""
    kinds = [
        ("vllm:spec_decode_num_drafts", "vllm:triforce_level3_steps"),
        ("vllm:spec_decode_num_draft_tokens", "vllm:triforce_level2_draft_tokens"),
        ("vllm:spec_decode_num_accepted_tokens", "vllm:triforce_level2_accepted_tokens"),
    ]
    names = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
    return [dict(zip(names, (counted[f"{k[i]}_total"] for k in kinds))) for i in (0, 1)]


@pytest.mark.thorough
def test_short_soak(server):
    """tests/soak.py with 40 requests: preempted, aborted, none lost, twice, leaked or wrong."""
    wanted = soak.random_streams(soak.settings_of("pair"), 1, count=40)
    figures, sent = soak.soak(server, "pair", wanted, 1)
    assert figures["preemptions"] > 0 and figures["vllm:triforce_proposals_total"] > 50
    compared, _ = soak.check_answers("pair", sent)
    assert compared > 20


def test_killed_worker_ends_every_request(server, text):
    """As in stock vLLM: clients get an error at once, nothing hangs, the server stops."""

    async def work(client):
        calls = [
            client.completions.create(
                prompt=text[: 600 + i], extra_body=IDS, **(GREEDY | {"max_tokens": 2000})
            )
            for i in range(3)
        ]
        stream = await client.completions.create(
            prompt=text[:500], stream=True, extra_body=IDS, **(GREEDY | {"max_tokens": 2000})
        )
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(3):
            await anext(stream)
        os.kill(server.processes()["Worker"].pid, signal.SIGKILL)

        async def drain():
            async for chunk in stream:
                if getattr(chunk, "error", None):
                    raise openai.APIError(str(chunk.error), None, body=None)

        tasks.append(asyncio.create_task(drain()))
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    results = run_async(server, work)
    assert all(isinstance(result, openai.APIError) for result in results), results
    assert server.process.wait(60) is not None
    assert "EngineDeadError" in server.text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{server.address}/health", timeout=5)
