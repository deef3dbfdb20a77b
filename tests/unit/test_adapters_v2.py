"""Promise: on Model Runner V2 every token of level 2's passes has its request's LoRA adapter."""

from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_captured_lora_counts
from vllm.v1.worker.gpu.lora_utils import LoraState

from tests.unit.fake_graphs import without_gpu
from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.runner_v2 import passes as model_pass
from vllm_triforce.runner_v2.adapters import LevelAdapters

MAX_LORAS = 3


class Runner:
    """vLLM's runner, as far as adapters need it; it notes the calls in ``told``."""

    def __init__(self, device: str = "cuda") -> None:
        self.lora_config = SimpleNamespace(max_loras=MAX_LORAS)
        self.lora_state = LoraState(8)
        self.device = SimpleNamespace(type=device)
        self.told: list[tuple] = []
        manager = SimpleNamespace(_last_mapping=None)
        self.lora_manager = SimpleNamespace(_adapter_manager=manager)

    def add(self, request_id: str, state: int, number: int, **more) -> None:
        adapter = LoRARequest(f"adapter {number}", number, "a folder", **more) if number else None
        self.lora_state.add_request(request_id, state, adapter)

    def _set_active_loras(self, by_logits, by_token, active) -> None:
        self.told.append((by_logits, by_token, {adapter.lora_int_id for adapter in active}))
        mapping = SimpleNamespace(prompt_mapping=by_logits, index_mapping=by_token)
        self.lora_manager._adapter_manager._last_mapping = mapping

    def step(self, *request_ids: str) -> None:
        """Run a full pass of a token each."""
        rows = np.array([int(name) for name in request_ids])
        inputs = self.lora_state.make_lora_inputs(list(request_ids), rows, np.ones_like(rows))
        self._set_active_loras(*inputs)
        self.told.clear()

    @contextmanager
    def maybe_setup_dummy_loras(self, lora_config):
        self.told.append(("dummies", lora_config.max_loras))
        yield
        self.told.append(("no dummies",))

    def maybe_select_dummy_loras(self, lora_config, num_scheduled, **more):
        self.told.append((list(num_scheduled), more))
        return nullcontext()

    def maybe_dummy_run_with_lora(self, *args, **more):
        raise AssertionError("it makes adapters")


@pytest.fixture
def runner():
    made = Runner()
    for state, number in enumerate((2, 0, 5)):
        made.add(str(state), state, number)
    return made


def test_every_token_has_its_requests_adapter_and_padding_none(runner):
    adapters = LevelAdapters(runner)
    assert adapters.has_any(["0", "1"]) and not adapters.has_any(["1"])
    adapters.begin_proposal(["2", "1", "0"], num_rows=4, query_len=3)
    rows = (5,) * 3 + (0,) * 3 + (2,) * 3
    assert runner.told == [(rows, rows + (0,) * 3, {2, 5})]


def test_adapters_loaded_in_place_load_once_a_step(runner):
    runner.add("3", 3, 1, load_inplace=True)
    LevelAdapters(runner).begin_proposal(["3", "0"], num_rows=2, query_len=1)
    assert runner.told == [((1, 2), (1, 2), {2})]


def test_plain_batches_pay_nothing(runner):
    """Telling vLLM again that there are no adapters would wait for the device."""
    adapters = LevelAdapters(runner)
    adapters.begin_proposal(["1"], 1, 3)
    assert runner.told == [((0,) * 3, (0,) * 3, set())], "nothing is known before the first step"
    runner.step("1")
    adapters.begin_proposal(["1"], 1, 3)
    assert runner.told == []
    runner.step("0", "1")
    adapters.begin_proposal(["1"], 1, 3)
    assert runner.told == [((0,) * 3, (0,) * 3, set())], "the step had one"


def test_each_row_of_logits_has_its_requests_adapter(runner):
    """A request has a row of logits for each draft, and one more."""
    names, states, tokens = ["2", "0", "1"], np.array([2, 0, 1]), np.array([3, 4, 2])
    wrong, *_ = runner.lora_state.make_lora_inputs(names, states, tokens)
    assert wrong == (5, 2, 0), "vLLM counts them itself: delete CountedLoraState"
    adapters = LevelAdapters(runner)
    adapters.begin_step({"2": [7, 8], "1": [9]})
    by_logits, by_token, active = runner.lora_state.make_lora_inputs(names, states, tokens)
    assert by_logits == (5, 5, 5, 2, 0, 0)
    assert by_token == (5,) * 3 + (2,) * 4 + (0,) * 2
    assert {adapter.lora_int_id for adapter in active} == {2, 5}
    adapters.begin_step({})
    assert runner.lora_state.make_lora_inputs(names, states, tokens)[0] == (5, 2, 0)


def test_trials_have_adapters_that_are_made_once(runner):
    adapters = LevelAdapters(runner)
    with adapters.with_dummy_adapters():
        with runner.maybe_dummy_run_with_lora(
            runner.lora_config,
            num_scheduled_tokens=[2, 1],
            num_sampled_tokens=None,
            remove_lora=True,
            num_active_loras=MAX_LORAS,
        ):
            pass
        adapters.begin_proposal([f"trial {row}" for row in range(4)], 4, 1)
    by_row = (1, 2, 3, 1)
    assert runner.told == [
        ("dummies", MAX_LORAS),
        ([2, 1], dict(num_sampled_tokens=None, num_active_loras=MAX_LORAS)),
        (by_row, by_row, {1, 2, 3}),
        ("no dummies",),
    ]
    assert not adapters.has_any(["trial 0"])
    with pytest.raises(AssertionError, match="it makes adapters"):
        runner.maybe_dummy_run_with_lora()


@pytest.fixture
def captured(runner, monkeypatch):
    """Capture a pass of at most four rows of three tokens; ``replayed`` notes its graphs."""
    replayed = without_gpu(monkeypatch)
    monkeypatch.setattr(
        model_pass, "forward", lambda *args: (torch.zeros(args[2], 2, dtype=torch.float32), ())
    )

    def make(adapters):
        made = model_pass.ModelPass(
            torch.nn.Module(),
            SimpleNamespace(compilation_config=SimpleNamespace(max_cudagraph_capture_size=64)),
            PassInputs(4, 3, 4, torch.device("cpu")),
            SimpleNamespace(get_hidden_size=lambda: 2, dtype=torch.float32),
            metadata=lambda num_rows: {},
            slots=lambda num_rows: {},
            name="pass",
            adapters=adapters,
        )
        made.capture(CUDAGraphMode.FULL_DECODE_ONLY, has_round_graphs=False)  # as with LoRA
        return made, replayed

    return make


def test_each_size_is_captured_without_and_with_adapters(runner, captured):
    level2, replayed = captured(LevelAdapters(runner))
    kinds = [(max(tokens), len(tokens)) for _, tokens, _ in runner.told]
    assert kinds == [(n, 3 * rows) for rows in (4, 2, 1) for n in (MAX_LORAS, 0)]
    for first, rows in product(("1", "0"), (1, 2, 3, 4)):
        size, has_adapters = (1, 2, 4, 4)[rows - 1], first == "0"
        level2.begin([first, "1", "none", "1"][:rows])
        if has_adapters:
            by_logits, by_token, _ = runner.told[-1]
            assert (len(by_logits), len(by_token)) == (3 * rows, 3 * size)
        assert level2.run(rows).shape == (rows, 3, 2)
        desc = replayed.pop()
        assert (desc.num_reqs, desc.num_active_loras > 0) == (size, has_adapters)


@pytest.mark.parametrize("num_rows", range(1, 6))
def test_a_graph_has_room_for_any_mix_of_adapters(runner, num_rows):
    """With ``specialize_active_lora`` a batch of more adapters would lose the last."""
    pytest.importorskip("triton")
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    meta = LoRAKernelMeta.make(
        MAX_LORAS, 64, "cpu", get_captured_lora_counts(MAX_LORAS, specialize=True)
    )

    def num_active(by_token: tuple[int, ...]) -> int:
        meta.prepare_tensors(torch.tensor(by_token) - 1)
        return int(meta.num_active_loras_cpu)

    LevelAdapters(runner).begin_capture(MAX_LORAS + 1, num_rows, 2)
    room = num_active(runner.told.pop()[1])
    for rows in product(range(MAX_LORAS + 1), repeat=num_rows):
        assert num_active(tuple(np.repeat(rows, 2))) <= room
