"""Rounds as CUDA graphs: what is replayed for which batch, and what is captured."""

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.unit.fake_graphs import without_gpu
from vllm_triforce.kernels.rows import Rows


class Pass:
    """A model's pass, which says when it is asked to run within another graph."""

    def __init__(self) -> None:
        from contextlib import contextmanager

        self.is_inlined = False

        @contextmanager
        def inlined():
            self.is_inlined = True
            yield
            self.is_inlined = False

        self.inlined = inlined


@pytest.fixture
def made(monkeypatch):
    pytest.importorskip("triton")
    replayed = without_gpu(monkeypatch)
    from vllm_triforce.device.row_work import RowWork

    def make(max_rows: int = 5):
        rows, its, calls = Rows(max_rows, 6, 2, max_rows, torch.device("cpu")), Pass(), []

        def work() -> tuple[int]:
            calls.append((rows.num_rows, its.is_inlined))
            return (rows.num_rows,)

        made = RowWork(work, rows, [its], None, torch.device("cpu"), "round")
        return made, rows, calls, replayed

    return make


def test_what_is_not_captured_is_done_for_the_rows_that_there_are(made):
    work, rows, calls, replayed = made()
    rows.num_rows = 3
    assert work() == (3,) and calls == [(3, False)] and not replayed


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
        assert work() == (size,), "what that graph makes"
        assert replayed.pop().num_reqs == size
    assert len(calls) == 4 and not replayed


def test_large_batches_launch_pass_by_pass(made):
    work, rows, calls, replayed = made(max_rows=40)
    work.capture(CUDAGraphMode.FULL_DECODE_ONLY)
    assert [size for size, _ in calls] == [16, 8, 4, 2, 1]
    rows.num_rows = 17
    assert work() == (17,) and calls[-1] == (17, False) and not replayed


SOME = torch.ones(2)


@pytest.mark.parametrize("asked", ["top_k", "top_p", "min_p", "shaping"])
@pytest.mark.parametrize("all_greedy", [True, False])
def test_only_temperatures_and_seeds_are_known_to_a_graph(asked, all_greedy):
    from vllm_triforce.device.batch import DeviceSampling

    assert DeviceSampling(all_greedy).is_plain
    assert not DeviceSampling(all_greedy, **{asked: SOME}).is_plain
