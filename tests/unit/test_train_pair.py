"""Promise: the training script runs on another device: nothing in a step stays on the CPU. It does
each of its jobs, from the sources of Python to checkpoints that transformers reads."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import ROOT

sys.path.append(str(ROOT / "examples"))

from train_pair.command import main
from train_pair.model import SIZES, Llama, Shape
from train_pair.text import VOCAB, Windows, documents, load_text
from train_pair.training import Muon, backward, one_loss


class NothingOnTheCPU(TorchDispatchMode):
    """Refuses an operation on a CPU tensor; numbers (no dimension) may be anywhere."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.ndim:
                assert value.device.type == "meta", f"{function} on {value.device}"
        return result


@pytest.mark.parametrize("sparse", [None, (256, 64)])
@pytest.mark.parametrize("taught", [False, True])
def test_a_step_of_training_stays_on_its_device(sparse, taught):
    model = Llama(SIZES["small"]["target"]).to("meta")
    teacher = Llama(SIZES["small"]["draft"]).to("meta") if taught else None
    tokens = torch.zeros(2, 1025, dtype=torch.long, device="meta")
    positions = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    matrices = [p for p in model.parameters() if p.ndim == 3]
    with NothingOnTheCPU():
        loss, shown = one_loss(model, teacher, tokens, positions, sparse)
        loss.backward()
        Muon(matrices, lr=0.02).step()
    assert shown.device.type == "meta" and all(p.grad is not None for p in matrices)


def test_batches_are_handed_over_on_the_device():
    windows = Windows(torch.arange(5000), seed=0, device="meta")
    assert windows.batch(2, 512, repeat=1.0).device.type == "meta"
    assert windows.positions(2, 512, 2048, skip=1.0).device.type == "meta"


def test_another_folder_adds_sources(tmp_path):
    text = "def added():\n    return 'more than two hundred characters of source'\n" * 5
    (tmp_path / "more.py").write_text(text)
    found = [text for _, text, _ in documents(tmp_path)]
    assert text in found and len(found) > 100
    assert len(documents(tmp_path, max_bytes=100_000)) < len(found)


def gradients(micro_tokens, sparse, taught, rows=5, length=1024):
    """Of one batch, and its loss; a step with them, too."""
    torch.manual_seed(0)
    shape = Shape(32, 2, 2, 16, 64, 2048, 1e4)
    model = Llama(shape)
    for layer in model.layers:  # as they begin, the matrices that write to the stream are 0
        for matrix in (layer.out, layer.down):
            matrix.data.normal_(std=0.1)
    teacher = Llama(shape).eval() if taught else None
    tokens = torch.randint(3, VOCAB, (rows, length + 1))
    positions = torch.arange(length).repeat(rows, 1)
    shown = backward(model, teacher, tokens, positions, sparse, micro_tokens)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 3]
    Muon(matrices, lr=0.02).step()
    return shown, found, [p.detach() for p in matrices]


@pytest.mark.parametrize("sparse, taught", [(None, False), ((256, 64), False), (None, True)])
@pytest.mark.parametrize("micro_tokens", [100, 2048, 3 * 1024 + 5])  # 1, 2 and 3 rows of five
def test_micro_batches_make_the_same_step(micro_tokens, sparse, taught):
    """Parts that are not all as large, each by its share."""
    whole = gradients(None, sparse, taught)
    parts = gradients(micro_tokens, sparse, taught)
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


def test_a_batch_goes_through_in_parts(monkeypatch):
    sizes = []

    def noting(model, teacher, tokens, positions, sparse):
        sizes.append(tuple(positions.shape))
        return one_loss(model, teacher, tokens, positions, sparse)

    monkeypatch.setattr("train_pair.training.one_loss", noting)
    gradients(2048, None, False)
    assert sizes == [(2, 1024), (2, 1024), (1, 1024)]


@pytest.mark.parametrize("what", ["tokens.pt", "tokenizer.json"])
def test_an_end_while_writing_leaves_nothing_half_written(tmp_path, monkeypatch, what):
    """A file that is there is taken for whole in the next run."""

    def end(path, target):
        if target.name == what:
            raise KeyboardInterrupt
        replace(path, target)

    replace = os.replace
    few = [("a", "def first():\n    return 1\n" * 50, False), ("b", "x = 2\n" * 50, True)]
    monkeypatch.setattr("train_pair.text.documents", lambda more_text=None: few)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            load_text(tmp_path)
    assert not (tmp_path / what).exists()
    train, held = load_text(tmp_path)
    assert len(train) > 10 and len(held) > 10


def test_it_runs_as_a_folder():
    command = [sys.executable, "examples/train_pair", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--rows-factor" in done.stdout and "Train the small target/draft pair" in done.stdout


def test_a_pair_is_trained_and_exported(tmp_path, monkeypatch, capsys):
    """For a second each, on a few sources in place of all: the jobs, in the order of its page."""
    few = [(n, f"def f{i}():\n    return {i}\n" * 400, i == 4) for i, n in enumerate("abcde")]
    monkeypatch.setattr("train_pair.text.documents", lambda more_text=None: few)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train_pair", "--work", str(tmp_path), *arguments])
        main()
        return capsys.readouterr().out

    assert "5.31 M parameters" in run("target", "--minutes", "0.01")
    assert "tokens by length: {512:" in run("draft", "--minutes", "0.01")
    seen = run("draft", "--minutes", "0.02", "--resume")
    assert torch.load(tmp_path / "draft.pt")["done"] == 0.02 and "saved: draft.pt" in seen
    out = tmp_path / "models"
    assert run("export", "--out", str(out)).count("logits as in transformers") == 2
    for name in ("target", "draft"):
        config = json.loads((out / name / "config.json").read_text())
        assert config["vocab_size"] == VOCAB and config["architectures"] == ["LlamaForCausalLM"]
        assert (out / name / "model.safetensors").is_file()
        assert (out / name / "tokenizer.json").is_file()
