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
