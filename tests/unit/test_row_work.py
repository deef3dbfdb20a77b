"""Rounds as CUDA graphs: what is replayed for which batch, and what is captured."""

import itertools
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.kernels.tensors import config_of
from tests.unit.fake_graphs import without_gpu
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.sampling import CAPTURED_SAMPLING, SamplingV2

CAPTURED, PRESENT = SamplingV2(False, has_masks=True, has_processors=True), SamplingV2(True)


class Pass:
    """A model's pass that notes when it is captured within another graph."""

    is_within_capture = False

    @contextmanager
    def within_capture(self):
        self.is_within_capture = True
        yield
        self.is_within_capture = False


@pytest.fixture
def made(monkeypatch):
    pytest.importorskip("triton")
    replayed = without_gpu(monkeypatch)
    from vllm_triforce.runner_v2.passes import GraphedRound

    def make(max_rows: int = 5):
        rows, its, calls = Rows(config_of(gamma=2), max_rows, 100, torch.device("cpu")), Pass(), []

        def work(sampling: SamplingV2) -> tuple[int]:
            assert sampling is (CAPTURED if its.is_within_capture else PRESENT)
            calls.append((rows.num_rows, its.is_within_capture))
            return (rows.num_rows,)

        config = SimpleNamespace(compilation_config=SimpleNamespace(max_cudagraph_capture_size=64))
        context = SimpleNamespace(rows=rows, vllm_config=config, device=torch.device("cpu"))
        made = GraphedRound(work, CAPTURED, [its], context, "round")
        return made, rows, calls, replayed

    return make


def test_each_size_is_captured_with_its_passes_within_and_replayed_for_fewer_rows(made):
    work, rows, calls, replayed = made()
    rows.num_rows = 2
    rows.count.fill_(2)
    work.capture(CUDAGraphMode.FULL_DECODE_ONLY)
    assert calls == [(5, True), (4, True), (2, True), (1, True)]
    assert rows.num_rows == 2, "as it was before"
    assert rows.count.item() == 0, "the warm-up writes nothing for anybody"
    for num_rows, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 5)):
        rows.num_rows = num_rows
        assert work(PRESENT) == (size,), "what that graph makes"
        assert replayed.pop().num_reqs == size
    assert len(calls) == 4 and not replayed


def test_large_batches_launch_pass_by_pass(made):
    work, rows, calls, replayed = made(max_rows=40)
    work.capture(CUDAGraphMode.FULL_DECODE_ONLY)
    assert [size for size, _ in calls] == [16, 8, 4, 2, 1]
    rows.num_rows = 17
    assert work(PRESENT) == (17,) and calls[-1] == (17, False) and not replayed


def test_rounds_of_every_kind_are_captured():
    captured = {sampling.kind: sampling for sampling in CAPTURED_SAMPLING}
    assert list(captured) == ["greedy", "sampled", "any"]
    for asked in itertools.product((False, True), repeat=3):
        batch = SamplingV2(*asked)
        its = captured[batch.kind]
        assert its.has_processors >= batch.has_processors
        assert its.all_greedy <= batch.all_greedy
        # Masks leave the best token.
        assert batch.all_greedy or its.has_masks >= batch.has_masks
    assert SamplingV2(True, has_masks=True).kind == "greedy", "which draws nothing"


def test_scratch_of_vllms_mask_kernels_lives_as_long_as_the_graphs(made, monkeypatch):
    from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton

    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", True)
    monkeypatch.setattr(topk_topp_triton, "_TRITON_BUFFER_CACHE", {})
    monkeypatch.setattr(topk_topp_triton, "_TRITON_SPLIT_CACHE", {})
    work, rows, *_ = made()
    rows.num_rows = 1
    buffer, part = torch.zeros(2, 8), torch.zeros(4)
    topk_topp_triton._TRITON_BUFFER_CACHE["here"] = buffer
    topk_topp_triton._TRITON_SPLIT_CACHE["here"] = {"stats": part}
    work.capture(CUDAGraphMode.FULL_DECODE_ONLY)
    gone = weakref.ref(buffer), weakref.ref(part)
    topk_topp_triton._TRITON_BUFFER_CACHE["here"] = torch.zeros(4, 8)  # as a larger batch does
    topk_topp_triton._TRITON_SPLIT_CACHE.clear()
    del buffer, part
    assert all(its() is not None for its in gone)
