"""Promise: the training script does each of its jobs, from the sources of Python to checkpoints
that transformers reads."""

import json
import sys

import pytest
import torch

from tests.models import ROOT

sys.path.append(str(ROOT / "examples"))

from train_pair.command import main
from train_pair.model import Llama, Shape
from train_pair.text import VOCAB
from train_pair.training import backward


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
