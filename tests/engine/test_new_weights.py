"""Promise: after new weights, sleep or a pause the output is stock vLLM's, and level 2 reads what
the new weights wrote.
"""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.conftest import triforce
from tests.generation import generate
from tests.head_oracle import LAYERS
from tests.inside import built, worker_of
from tests.models import make_head
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

MAX_TOKENS = 48
PAUSE_AT = 4


@pytest.fixture(scope="module")
def prompts(stock, text):
    return [text[:300], text[2000:2600]]


@pytest.fixture(scope="module")
def other(pair, tmp_path_factory) -> str:
    """The target with a little noise on its weights."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(pair["target"], folder)
    torch.manual_seed(0)
    weights = {
        name: value + 0.02 * value.float().std() * torch.randn_like(value)
        if value.dim() == 2
        else value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def reload(llm, path: str, reset_running_requests: bool = False) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    assert llm.reset_prefix_cache(reset_running_requests)


@pytest.fixture
def weights_restored(stock, llm, pair):
    yield
    for engine in (stock, llm):
        reload(engine, pair["target"])


class FromFolder(WeightTransferEngine):
    """Trainer that sends the weights of a folder, in checkpoint format as vLLM's own do."""

    init_info_cls = update_info_cls = dict

    def init_transfer_engine(self, init_info) -> None: ...

    def shutdown(self) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info) -> None:
        self.receive_weights(update_info)  # vLLM's waits for an accelerator

    def receive_weights(self, update_info) -> None:
        weights = load_file(f"{update_info['folder']}/model.safetensors")
        self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)


@pytest.fixture(scope="module")
def transfer() -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightTransferEngineFactory, "_registry", {"folder": lambda: FromFolder})
        yield {"weight_transfer_config": WeightTransferConfig(backend="folder")}


def send(llm, folder: str, start: str = "start_weight_update") -> None:
    llm.collective_rpc(start)
    llm.collective_rpc("update_weights", args=({"folder": folder},))
    llm.collective_rpc("finish_weight_update")
    assert llm.reset_prefix_cache()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("vllm.triforce")
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_transferred_weights(stock, engines, pair, other, prompts, transfer, said, tmp_path):
    """The target's and the draft's arrive; the log says that a copy keeps its own."""
    keys = triforce(model=pair["draft"], retrieval_budget=256, level2_model="bfloat16")
    llm = engines.get(pair["target"], keys, **transfer)
    old = generate(llm, prompts, max_tokens=MAX_TOKENS)
    send(llm, other)
    reload(stock, other)
    new = generate(stock, prompts, max_tokens=MAX_TOKENS)
    assert generate(llm, prompts, max_tokens=MAX_TOKENS) == new != old
    (line,) = said
    assert "level2_model=bfloat16 keeps the weights from before" in line
    reload(stock, pair["target"])

    draft = worker_of(llm).triforce.model
    before = draft.lm_head.weight.clone()
    folder = shutil.copytree(pair["draft"], tmp_path / "draft")
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, folder / "model.safetensors")
    send(llm, folder, "start_draft_weight_update")
    assert torch.equal(draft.lm_head.weight, 2 * before) and len(said) == 1
    assert generate(llm, prompts, max_tokens=MAX_TOKENS) == new


def test_a_head_gets_transferred_weights(engines, pair, other, transfer, tmp_path):
    """What it shares with the target comes with the target's, the rest as a draft model's."""
    head = make_head(tmp_path / "head", pair["target"], draft_vocab=2048, layers=LAYERS)
    llm = engines.get(pair["target"], triforce(model=head), **transfer)
    draft, target = worker_of(llm).triforce.model, worker_of(llm).get_model()
    shared, own = draft.model.embed_tokens.weight, draft.lm_head.weight
    before, old = shared.clone(), own.clone()
    send(llm, other)
    assert not torch.equal(shared, before)
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(draft.lm_head.weight, old)
    make_head(tmp_path / "head", pair["target"], draft_vocab=2048, layers=LAYERS, seed=1)
    send(llm, tmp_path / "head", "start_draft_weight_update")
    assert not torch.equal(draft.lm_head.weight, old)


def counted(llm, prompts) -> tuple[list[list[int]], dict]:
    before = counters_of(llm)
    tokens = generate(llm, prompts, max_tokens=MAX_TOKENS)
    found = counters_of(llm).since(before).to_dict()
    del found["time_seconds"]
    return tokens, found


def test_reloaded_weights(stock, llm, pair, other, prompts, weights_restored):
    """The old weights come back with their acceptance; with a budget that covers the context all
    that level 2 says is accepted under the new ones."""
    stock.reset_prefix_cache()
    llm.reset_prefix_cache()
    old = generate(stock, prompts, max_tokens=MAX_TOKENS)
    tokens, first = counted(llm, prompts)
    assert tokens == old and first["num_level2_accepted"] > 0

    for engine in (stock, llm):
        reload(engine, other)
    new = generate(stock, prompts, max_tokens=MAX_TOKENS)
    assert any(a != b for a, b in zip(old, new)), "the weights change too little"
    assert counted(llm, prompts)[0] == new
    cache = built(llm).speculator.level2.cache
    budget, cache.budget = cache.budget, replace(cache.budget, min_blocks=128, max_blocks=128)
    tokens, covering = counted(llm, prompts)
    cache.budget = budget
    assert tokens == new
    assert covering["num_level2_accepted"] == covering["num_level2_drafted"] > 20

    reload(llm, pair["target"])
    assert counted(llm, prompts) == (old, first)
    llm.sleep(level=1)  # which vLLM's CPU build pauses for, and then ignores
    llm.wake_up()
    assert counted(llm, prompts) == (old, first)


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=pytest.mark.thorough)])
def test_paused_for_new_weights(stock, llm, other, prompts, weights_restored, mode):
    """What was generated stays; what comes after is what stock says behind it with the new
    weights. Or the requests are aborted, and nothing is kept for them."""
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params.clone())
    so_far, ended = {}, {}
    before = counters_of(llm)
    for _ in range(PAUSE_AT):
        so_far |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    assert counters_of(llm).since(before).num_level2_accepted > 0
    assert all(0 < len(tokens) < MAX_TOKENS - 5 for tokens in so_far.values()), so_far
    core.pause_scheduler(mode, clear_cache=False)
    assert not engine.step()
    reload(llm, other, reset_running_requests=True)
    core.resume_scheduler()
    if mode == "abort":
        engine.abort_request(["0", "1"])  # the front's part, which a server does by itself
    while engine.has_unfinished_requests():
        ended |= {o.request_id: o for o in engine.step() if o.finished}
    reload(stock, other)
    for number, prompt in enumerate(prompts if mode == "keep" else ()):
        said = so_far[str(number)]
        found = list(ended[str(number)].outputs[0].token_ids)
        (wanted,) = generate(stock, [prompt + said], max_tokens=MAX_TOKENS - len(said))
        assert found == said + wanted
    assert generate(llm, prompts, max_tokens=8) == generate(stock, prompts, max_tokens=8)
    assert max(llm.collective_rpc("triforce_held_requests")[0].values()) <= len(prompts)
