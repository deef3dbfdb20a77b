"""Promise: a KV connector sees the full passes and nothing of what is tried inside a proposal."""

from collections import Counter

import pytest
from vllm.distributed import kv_transfer
from vllm.model_executor.layers.attention import kv_transfer_utils

from tests.conftest import triforce
from tests.engine.test_scheduling import greedy
from tests.inside import worker_of
from tests.outputs import assert_same_outputs, run, speculating
from tests.parity.disturbing import watch
from vllm_triforce.vllm_patches.kv_connector import hidden_kv_connector


def test_hidden_inside_only(monkeypatch):
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    with hidden_kv_connector():
        assert not kv_transfer_utils.has_kv_transfer_group()
    assert kv_transfer_utils.has_kv_transfer_group()


@pytest.mark.engine
def test_layers_are_saved_once_a_full_pass(engines, pair, stock, text, tmp_path):
    """vLLM's example connector writes each layer to a file after its attention: once for each full
    pass, although levels 1 and 2 went through the same layers many times. Outputs are stock's."""
    prompts, params = [text[:500], text[700:1500]], [greedy(30, ignore_eos=True)] * 2
    wanted = run(stock, prompts, params)  # the connector is the process's, not an engine's
    keys = triforce(retrieval_budget=192, model=pair["draft"])
    llm = engines.get(
        pair["target"],
        keys,
        max_model_len=2048,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    )
    try:
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
            found = run(llm, prompts, params)
        assert_same_outputs(None, wanted, found)
        assert set(saved) == set(worker.triforce.target_layers)
        num_passes = sum(step.total_num_scheduled_tokens > 0 for (step, *_), _ in calls)
        assert set(saved.values()) == {num_passes}
    finally:
        engines.clear()
        kv_transfer.ensure_kv_transfer_shutdown()
