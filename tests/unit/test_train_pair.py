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


def gradients(train_pair, micro_tokens, sparse, taught, rows=5, length=1024):
    """Of one batch, and its loss; a step with them, too."""
    torch.manual_seed(0)
    shape = train_pair.Shape(32, 2, 2, 16, 64, 2048, 1e4)
    model = train_pair.Llama(shape)
    for layer in model.layers:  # as they begin, the matrices that write to the stream are 0
        for matrix in (layer.out, layer.down):
            matrix.data.normal_(std=0.1)
    teacher = train_pair.Llama(shape).eval() if taught else None
    tokens = torch.randint(3, train_pair.VOCAB, (rows, length + 1))
    positions = torch.arange(length).repeat(rows, 1)
    shown = train_pair.backward(model, teacher, tokens, positions, sparse, micro_tokens)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 3]
    train_pair.Muon(matrices, lr=0.02).step()
    return shown, found, [p.detach() for p in matrices]


@pytest.mark.parametrize("sparse, taught", [(None, False), ((256, 64), False), (None, True)])
@pytest.mark.parametrize("micro_tokens", [100, 2048, 3 * 1024 + 5])  # 1, 2 and 3 rows of five
def test_micro_batches_make_the_same_step(train_pair, micro_tokens, sparse, taught):
    """Parts that are not all as large, each by its share."""
    whole = gradients(train_pair, None, sparse, taught)
    parts = gradients(train_pair, micro_tokens, sparse, taught)
    close = dict(rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts[0], whole[0], **close)
    assert whole[1].keys() == parts[1].keys() and whole[0][0] > 0
    assert (whole[0][1] > 0) == (sparse is not None)
    for name, gradient in whole[1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(parts[1][name], gradient, **close)
    # Orthogonalising makes every direction of an update as large: small errors grow with it.
    for one, other in zip(parts[2], whole[2]):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_batch_goes_through_in_parts(train_pair, monkeypatch):
    sizes = []
    one_loss = train_pair.one_loss

    def noting(model, teacher, tokens, positions, sparse):
        sizes.append(tuple(positions.shape))
        return one_loss(model, teacher, tokens, positions, sparse)

    monkeypatch.setattr(train_pair, "one_loss", noting)
    gradients(train_pair, 2048, None, False)
    assert sizes == [(2, 1024), (2, 1024), (1, 1024)]


@pytest.mark.parametrize("what", ["tokens.pt", "tokenizer.json"])
def test_an_end_while_writing_leaves_nothing_half_written(train_pair, tmp_path, monkeypatch, what):
    """A file that is there is taken for whole in the next run."""

    def end(path, target):
        if target.name == what:
            raise KeyboardInterrupt
        replace(path, target)

    replace = train_pair.os.replace
    few = [("a", "def first():\n    return 1\n" * 50, False), ("b", "x = 2\n" * 50, True)]
    monkeypatch.setattr(train_pair, "documents", lambda more_text=None: few)
    with monkeypatch.context() as patched:
        patched.setattr(train_pair.os, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            train_pair.load_text(tmp_path)
    assert not (tmp_path / what).exists()
    train, held = train_pair.load_text(tmp_path)
    assert len(train) > 10 and len(held) > 10
