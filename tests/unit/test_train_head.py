"""Promise: the training script makes a head, and continues where it was stopped."""

import json
import shutil
import sys

import pytest
import torch

from tests.conftest import triforce
from tests.models import ROOT, make_llama
from tests.refusals import engine_config

sys.path.append(str(ROOT / "examples"))

from train_head import training
from train_head.command import main
from train_head.head import Head, Shape


@pytest.mark.slow
def test_every_step_from_text_to_a_checkpoint(tmp_path, monkeypatch, capsys):
    """On a small target; a second call of a step does what is left, which is nothing."""
    monkeypatch.setattr(training, "LENGTH", 32)
    target = make_llama(tmp_path / "target", vocab_size=512, num_layers=8, std=0.1)
    rows = [
        {"tokens": torch.randint(512, (80,), generator=torch.Generator().manual_seed(i)).tolist()}
        for i in range(32)
    ]
    work = tmp_path / "work"
    work.mkdir()
    lines = [json.dumps({"kind": "document", **row, "begin": 0}) + "\n" for row in rows]
    (work / "documents.jsonl").write_text("".join(lines))

    def run(*arguments: str) -> str:
        command = ["train_head", "--target", target, "--work", str(work), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        main()
        return capsys.readouterr().out

    run("states")
    assert len(list((work / "states").glob("*.pt"))) == 32
    (work / "states" / "00003.pt").unlink()
    run("states")
    assert len(list((work / "states").glob("*.pt"))) == 32
    train = ("train", "--rows", "2", "--draft-vocab", "256", "--lr", "0.01")
    assert "step 0 of 31" in run(*train, "--epochs", "1")
    said = run(*train, "--epochs", "4")
    assert "step 31 of 124" in said
    losses = [line.split("losses ")[1].split()[0] for line in said.splitlines() if "loss" in line]
    assert float(losses[-1]) < 0.6 * float(losses[0]), said
    assert said.count("accepted, by token") == 2
    shutil.rmtree(work / "states")  # now in memory
    assert "losses" not in run(*train, "--epochs", "8", "--minutes", "0.001")
    run("export", "--out", str(tmp_path / "head"))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    accepted = engine_config(target, triforce(model=str(tmp_path / "head")))
    assert accepted.speculative_config.draft_model_config.hf_config.draft_vocab_size == 256


def test_a_later_step_attends_to_its_own_chain():
    """As if each place had its own sequence: the states up to it, then its drafts."""
    torch.manual_seed(0)
    shape = Shape(64, 96, 4, 2, 16, 10000.0, 1e-6, 32)
    layer = Head(shape).midlayer
    embeds, hidden = torch.randn(1, 7, 64), torch.randn(1, 5, 64)
    cache: list = []
    outputs = [hidden]
    for step in range(3):
        positions = torch.arange(step, step + 5)
        outputs.append(layer(embeds[:, step : step + 5], outputs[-1], positions, cache))
    for place in range(5):
        alone: list = []
        first = layer(
            embeds[:, : place + 1], hidden[:, : place + 1], torch.arange(place + 1), alone
        )
        state = first[:, -1:]
        for step in (1, 2):
            at = place + step
            state = _next(layer, embeds[:, at : at + 1], state, at, alone)
            assert torch.allclose(state, outputs[step + 1][:, place : place + 1], atol=1e-5)


def _next(layer, embeds, hidden, position: int, cache: list) -> torch.Tensor:
    """Run one token after all in ``cache``, causally."""
    from unittest import mock

    def attend_to_all(q, cache):
        keys, values = (torch.cat(parts, 2) for parts in zip(*cache))
        weights = (q @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
        return weights @ values

    with mock.patch("train_head.head.attend", attend_to_all):
        return layer(embeds, hidden, torch.tensor([position]), cache)
