"""Promise: a KV connector sees the full passes and nothing of what is tried inside a proposal."""

from collections import Counter
from functools import partial

import pytest
from vllm.distributed import kv_transfer

from tests.conftest import triforce
from tests.head_oracle import LAYERS, VOCAB
from tests.inside import worker_of
from tests.models import make_head
from tests.outputs import assert_same_outputs, greedy, run, speculating
from tests.parity.disturbing import watch
from vllm_triforce.metrics.report import counters_of

SOURCES = ("lookup", "draft model", "head", "copy")
LENGTH, BLOCK = 610, 32
STORED = LENGTH // BLOCK * BLOCK
PARAMS = greedy(40)


def connected(work, engines, target: str, connector: str, store: str, keys: dict | None = None):
    """Call ``work`` with an engine that has a KV connector, which is the process's.

    An engine that ends takes the connector along, so nothing may keep one until the next begins.
    """
    more = {
        "ExampleConnector": {"shared_storage_path": store},
        "OffloadingConnector": {
            "spec_name": "CopyingSpec",
            "spec_module_path": "tests.engine.offloading_on_cpu",
            "cpu_bytes_to_use": 1 << 27,
            "offload_prompt_only": False,
            "store": store,
        },
    }
    try:
        work(
            engines.get(
                target,
                keys,
                max_model_len=2048,
                block_size=BLOCK,
                num_gpu_blocks_override=80,  # so that blocks are used again
                kv_transfer_config={
                    "kv_connector": connector,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": more[connector],
                },
            )
        )
    finally:
        engines.clear()
        kv_transfer.ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def prompts(stock, text) -> dict[str, list[int]]:
    """Return a prompt for each source, one for stock vLLM, one with the start of this, and the
    prompts of second turns."""
    names = ("stock", *SOURCES)
    first = {name: text[1000 * i : 1000 * i + LENGTH] for i, name in enumerate(names)}
    answers = run(stock, list(first.values()), [PARAMS] * len(names))
    second = {
        f"{name}, turn 2": prompt + list(answer.outputs[0].token_ids) + text[7000:7050]
        for (name, prompt), answer in zip(first.items(), answers)
    }
    return first | second | {"fork": first["stock"][:400] + text[8000:8200]}


@pytest.fixture(scope="module")
def wanted(stock, prompts) -> dict:
    return dict(zip(prompts, run(stock, list(prompts.values()), [PARAMS] * len(prompts))))


@pytest.fixture(scope="module")
def keys(pair, tmp_path_factory) -> dict[str, dict]:
    head = tmp_path_factory.mktemp("heads") / "head"
    more = {
        "lookup": {},
        "draft model": {"model": pair["draft"]},
        "head": {"model": make_head(head, pair["target"], draft_vocab=VOCAB, layers=LAYERS)},
        "copy": {"model": pair["draft"], "level2_model": "bfloat16"},
    }
    return {source: triforce(retrieval_budget=192, **more[source]) for source in SOURCES}


@pytest.mark.engine
@pytest.mark.parametrize("connector", ["ExampleConnector", "OffloadingConnector"])
def test_prefixes_are_exchanged(
    engines, pair, prompts, wanted, keys, connector, tmp_path, monkeypatch
):
    """Prefixes that stock vLLM, or an engine with another source of drafts, has stored are loaded,
    and those stored here are loaded by stock vLLM. Outputs are stock's, and level 2 accepts as
    much over a prefix that was loaded as over one that was computed."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # blocks have the same hashes in each engine

    place = engines, pair["target"], connector, str(tmp_path / "store")

    def ask(num_cached: dict[str, int], llm) -> None:
        names = list(num_cached)
        found = run(llm, [prompts[name] for name in names], [PARAMS] * len(names))
        assert_same_outputs(None, [wanted[name] for name in names], found)
        assert {n: o.num_cached_tokens for n, o in zip(names, found)} == num_cached

    def ask_and_count(num_cached: dict[str, int], llm):
        before = counters_of(llm)
        ask(num_cached, llm)
        return counters_of(llm).since(before)

    def ask_all(source: str, fork: int, llm) -> None:
        cold = ask_and_count({source: 0}, llm)
        llm.reset_prefix_cache()
        ask({f"{source}, turn 2": turn}, llm)
        llm.reset_prefix_cache()
        ask({source: STORED, "stock": STORED}, llm)
        llm.reset_prefix_cache()
        run(llm, [prompts[source][:200]], [greedy(1)])  # its start is in the prefix cache
        ask({source: STORED, "fork": fork}, llm)
        llm.reset_prefix_cache()
        hit = ask_and_count({source: STORED}, llm)
        assert cold.num_level2_accepted > 0, source
        assert abs(hit.num_level2_accepted - cold.num_level2_accepted) <= 1, (source, cold, hit)
        assert abs(hit.num_level2_drafted - cold.num_level2_drafted) <= 1, (source, cold, hit)

    connected(partial(ask, {"stock": 0}), *place)
    # The example connector stores prompts only, and finds whole ones.
    finds_parts = connector == "OffloadingConnector"
    fork, turn = 400 // BLOCK * BLOCK * finds_parts, 640 * finds_parts
    for source in SOURCES:
        connected(partial(ask_all, source, fork), *place, keys[source])
        fork = (len(prompts["fork"]) - 1) // BLOCK * BLOCK
    connected(partial(ask, dict.fromkeys(SOURCES, STORED)), *place)


@pytest.mark.engine
def test_layers_are_saved_once_a_full_pass(engines, pair, prompts, wanted, keys, tmp_path):
    """vLLM's example connector writes each layer to a file after its attention: once for each full
    pass, although levels 1 and 2 went through the same layers many times. Outputs are stock's."""

    def count(llm) -> None:
        connector = kv_transfer.get_kv_transfer_group()
        saved: Counter = Counter()
        original = connector.save_kv_layer

        def save(layer_name, *args, **kwargs):
            saved[layer_name] += 1
            return original(layer_name, *args, **kwargs)

        connector.save_kv_layer = save
        worker = worker_of(llm)
        with (
            watch(worker.model_runner, "execute_model") as calls,
            speculating(llm, rejections=False),
        ):
            found = run(llm, [prompts[name] for name in SOURCES], [PARAMS] * len(SOURCES))
        assert_same_outputs(None, [wanted[name] for name in SOURCES], found)
        assert set(saved) == set(worker.triforce.target_layers)
        num_passes = sum(step.total_num_scheduled_tokens > 0 for (step, *_), _ in calls)
        assert set(saved.values()) == {num_passes}

    connected(
        count, engines, pair["target"], "ExampleConnector", str(tmp_path), keys["draft model"]
    )
