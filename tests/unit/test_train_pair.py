"""Promise: the training script runs on another device: nothing in a step stays on the CPU."""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import ROOT


class NothingOnTheCPU(TorchDispatchMode):
    """Refuses an operation on a CPU tensor; numbers (no dimension) may be anywhere."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.ndim:
                assert value.device.type == "meta", f"{function} on {value.device}"
        return result


@pytest.fixture(scope="module")
def train_pair():
    spec = importlib.util.spec_from_file_location("train_pair", ROOT / "examples" / "train_pair.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sparse", [None, (256, 64)])
@pytest.mark.parametrize("taught", [False, True])
def test_a_step_of_training_stays_on_its_device(train_pair, sparse, taught):
    model = train_pair.Llama(train_pair.SIZES["small"]["target"]).to("meta")
    teacher = train_pair.Llama(train_pair.SIZES["small"]["draft"]).to("meta") if taught else None
    tokens = torch.zeros(2, 1025, dtype=torch.long, device="meta")
    positions = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    matrices = [p for p in model.parameters() if p.ndim == 3]
    with NothingOnTheCPU():
        loss, shown = train_pair.one_loss(model, teacher, tokens, positions, sparse)
        loss.backward()
        train_pair.Muon(matrices, lr=0.02).step()
    assert shown.device.type == "meta" and all(p.grad is not None for p in matrices)


def test_batches_are_handed_over_on_the_device(train_pair):
    windows = train_pair.Windows(torch.arange(5000), seed=0, device="meta")
    assert windows.batch(2, 512, repeat=1.0).device.type == "meta"
    assert windows.positions(2, 512, 2048, skip=1.0).device.type == "meta"


def test_another_folder_adds_sources(train_pair, tmp_path):
    text = "def added():\n    return 'more than two hundred characters of source'\n" * 5
    (tmp_path / "more.py").write_text(text)
    found = [text for _, text, _ in train_pair.documents(tmp_path)]
    assert text in found and len(found) > 100
    assert len(train_pair.documents(tmp_path, most_bytes=100_000)) < len(found)
