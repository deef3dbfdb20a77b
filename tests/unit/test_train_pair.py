"""Promise: the training script does each of its jobs, from the sources of Python to checkpoints
that transformers reads, and leaves nothing of a step on the CPU."""

import json
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import ROOT

sys.path.append(str(ROOT / "examples"))

from train_pair.command import main
from train_pair.model import SIZES, Llama, Shape
from train_pair.text import VOCAB, load_text
from train_pair.training import Muon, backward, one_loss


class NothingOnTheCPU(TorchDispatchMode):
    """Refuses an operation on a CPU tensor; numbers (no dimension) may be anywhere."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.ndim:
                assert value.device.type == "meta", f"{function} on {value.device}"
        return result


@pytest.mark.parametrize("sparse, taught", [((256, 64), False), (None, True)])
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


def gradients(micro_tokens, sparse, taught, rows=5, length=256) -> list[torch.Tensor]:
    """Return the losses and gradients of one batch."""
    torch.manual_seed(0)
    shape = Shape(32, 2, 2, 16, 64, 512, 1e4)
    model = Llama(shape)
    for layer in model.layers:  # the matrices that write to the stream begin at 0
        for matrix in (layer.out, layer.down):
            matrix.data.normal_(std=0.1)
    teacher = Llama(shape).eval() if taught else None
    tokens = torch.randint(3, VOCAB, (rows, length + 1))
    positions = torch.arange(length).repeat(rows, 1)
    shown = backward(model, teacher, tokens, positions, sparse, micro_tokens)
    assert shown[0] > 0 and (shown[1] > 0) == (sparse is not None)
    return [shown, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "sparse, taught, micro_tokens", [((64, 32), False, 100), (None, False, 600), (None, True, 800)]
)
def test_micro_batches_make_the_same_gradients(sparse, taught, micro_tokens):
    """Parts of 1, 2 and 3 rows of five count by their share."""
    whole = gradients(None, sparse, taught)
    for part, all_rows in zip(gradients(micro_tokens, sparse, taught), whole, strict=True):
        assert all_rows.abs().max() > 0
        torch.testing.assert_close(part, all_rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", ["tokens.pt", "tokenizer.json"])
def test_an_end_while_writing_leaves_nothing_half_written(tmp_path, monkeypatch, what):
    """The next run takes an existing file for whole."""

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


@pytest.mark.thorough
def test_a_pair_is_trained_and_exported(tmp_path, monkeypatch, capsys):
    """Train for a second each on a few sources."""
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
