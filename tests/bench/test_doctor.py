"""Promise: the doctor says what an engine would do, without weights: what it names is what runs,
what it calls refused is refused, and with the same words.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests import child
from tests.models import make_architecture, make_llama
from vllm_triforce.cli import main
from vllm_triforce_bench.doctor.report import write_report
from vllm_triforce_bench.predict.machine import MACHINES

OPTIONS = ["--dtype", "float32", "--max-model-len", "8192"]


def without_weights(model, folder) -> str:
    """A copy of all but the weights: whoever reads them fails."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


def doctor(capsys, *arguments: str, machine: str = "H200") -> tuple[int, dict]:
    """With what is printed as JSON."""
    code = main(["doctor", *arguments, "--json", "--machine", machine])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def pair(gqa_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("no-weights")
    return {name: without_weights(gqa_pair[name], folder / name) for name in ("target", "draft")}


def test_the_installation_alone(capsys):
    import vllm

    code, found = doctor(capsys)
    assert code == 0 and found["runs"]
    installation = found["installation"]
    assert installation["vllm"] == vllm.__version__ and installation["is_supported"]
    assert installation["platform"] == "cpu" and installation["refusal"] is None
    assert "EngineArgs.create_engine_config" in [each["what"] for each in installation["wraps"]]


def test_what_would_run_is_what_the_engine_is_configured_as(capsys, pair):
    from vllm.engine.arg_utils import EngineArgs

    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 512, "gamma": 3}
    code, found = doctor(capsys, pair["target"], *OPTIONS, "--speculative-config", json.dumps(keys))
    args = EngineArgs(
        model=pair["target"], dtype="float32", max_model_len=8192, speculative_config=keys
    )
    config = args.create_engine_config()
    engine = found["engine"]
    assert code == 0
    assert engine["runner"] == ("V2" if config.use_v2_model_runner else "V1")
    assert engine["worker"] == config.parallel_config.worker_cls
    settings = json.loads(json.dumps(config.additional_config["triforce"]))
    assert {**engine["settings"], "draft_model": engine["draft"]} == settings
    assert engine["settings"]["gamma"] == 3 and "gamma" not in engine["chosen_while_running"]
    assert found["layers"]["attention_backend"] == "CPU_ATTN"
    assert len(found["layers"]["retrieve"]) == config.model_config.hf_config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
def test_layers_with_a_window_are_named(capsys, tmp_path, name):
    from transformers import AutoConfig

    model = make_architecture(tmp_path / "model", name)
    kinds = AutoConfig.from_pretrained(model).layer_types
    _, found = doctor(capsys, without_weights(model, tmp_path / "bare"), "--dtype", "float32")
    layers = found["layers"]
    assert len(layers["dense"]) == kinds.count("sliding_attention") > 0
    assert len(layers["retrieve"]) == kinds.count("full_attention") > 0
    assert all("sliding window of" in why for why in layers["dense"].values())
    assert "stay dense" in found["prediction"]["not_predicted"]


def test_a_target_without_level_2(capsys, tmp_path):
    """Levels 1 and 3 speculate for it; the reason is that of the engine's log."""
    windows = make_architecture(tmp_path / "windows", "mistral", sliding_window=64)
    status, results = doctor(capsys, windows)
    assert (status, results["runs"]) == (0, True)
    assert "window of 64 tokens" in results["engine"]["no_level2"]
    assert results["engine"]["settings"]["levels"] == "1,3"
    assert "layers" not in results and "prediction" not in results


def test_memory_is_that_of_the_model(capsys, tmp_path):
    model = make_llama(tmp_path / "model", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32)
    weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    _, found = doctor(capsys, without_weights(model, tmp_path / "bare"), *OPTIONS)
    memory = found["memory"]
    assert memory["kv_bytes_per_token"] == 3 * 2 * 2 * 32 * 4
    assert memory["weight_bytes"] == pytest.approx(weights, rel=0.02)
    # For each block, of 64 keys and values, a mean key in 8 bits with its scale, and a copy.
    assert memory["triforce_share_of_kv"] == pytest.approx((32 + 4 + 4 * 32) / (64 * 4 * 32))


@pytest.mark.parametrize("kv_bytes", [2, 1], ids=["auto", "fp8"])
def test_the_prediction_is_the_model_of_times(capsys, tmp_path, kv_bytes):
    from benchmarks.gpu.models import MODELS, write_model
    from vllm_triforce_bench.predict.steps import LOOKUP, Acceptance, Predictor, settings

    like = MODELS["llama-3.1-8b"]
    model = write_model(like, tmp_path)
    options = ("--max-model-len", "65536", "--max-num-seqs", "4", "--acceptances", "0.9")
    if kv_bytes == 1:
        options += ("--kv-cache-dtype", "fp8")
    _, found = doctor(capsys, model, *options)
    prediction = found["prediction"]
    assert prediction["machine"] == "H200"
    assert [cell["batch"] for cell in prediction["cells"]] == [1, 4]
    sizes = dataclasses.replace(like, kv_bytes_each=kv_bytes)
    predictor = Predictor(MACHINES["H200"], sizes, None, chunk=32)
    among = settings(4096, (LOOKUP,))
    for cell in prediction["cells"]:
        last = cell["contexts"][-1]
        assert last["context"] == 65536
        best = predictor.best(among, 65536, cell["batch"], Acceptance(0.9))
        assert last["speedup"] == pytest.approx(best.speedup)
        gains = [at["setting"] != "plain" for at in cell["contexts"]]
        since = cell["pays_from"]
        assert gains == [since is not None and at["context"] >= since for at in cell["contexts"]]
    assert all(1 <= its["routes"]["lookup"]["tokens"] < 1.1 for its in prediction["break_even"])


def test_the_keys_that_the_prediction_would_choose(capsys, tmp_path):
    """Each gains 5 % beside those before it; a refused one is none of them."""
    from benchmarks.gpu.models import MODELS, write_head, write_model

    model = write_model(MODELS["llama-3.1-8b"], tmp_path / "target")

    def choice(keys: dict, *options: str) -> dict:
        given = ("--speculative-config", json.dumps(keys)) if keys else ()
        return doctor(capsys, model, *given, *options)[1]["prediction"]["choice"]

    alone = choice({"levels": "2,3"}, "--acceptances", "0.9,0.95")
    assert [key["key"] for key in alone["keys"]] == ["level2_model"]
    assert alone["context"] == 32_768 and alone["acceptance"] == 0.95
    command = f"vllm serve {model} --speculative-model triforce --speculative-config"
    assert alone["command"] == f"""{command} '{{"levels": "2,3", "level2_model": "fp8"}}'"""
    (fp8,) = alone["keys"]
    assert fp8["from"] == alone["speedup"] and fp8["to"] > 1.05 * fp8["from"]
    assert choice({"levels": "2,3", "level2_model": "fp8"})["keys"] == []
    wide = choice({"levels": "2,3"}, "--dtype", "float32", "--max-model-len", "16384")
    assert [key["value"] for key in wide["keys"]] == ["bfloat16"]
    # Without a draft, the gain of a head is said, and no name of one.
    (head,) = choice({}, "--max-model-len", "16384")["keys"]
    assert (head["key"], head["value"]) == ("model", "HEAD") and head["to"] > head["from"]
    own = write_head(MODELS["llama-3.1-8b"], tmp_path / "head")
    assert not any(key["key"] == "model" for key in choice({"model": own})["keys"])


@pytest.mark.parametrize(
    "options, wanted",
    [
        ([], """'{"level2_model": "fp8"}'"""),
        (["-sc", '{"model": "a b"}'], """'{"model": "a b", "level2_model": "fp8"}'"""),
        (["--speculative_config={}"], """'{"level2_model": "fp8"}'"""),
    ],
)
def test_the_command_keeps_the_users_options(options, wanted):
    from vllm_triforce_bench.doctor.prediction import command

    made = command("M", ["--max-model-len", "8192", *options], {"level2_model": "fp8"})
    start = "vllm serve M --max-model-len 8192 --speculative-model triforce --speculative-config"
    assert made == f"{start} {wanted}"
    dotted = command("M", ["--speculative-config.gamma", "3"], {"level2_model": "fp8"})
    assert dotted.endswith("--speculative-config.level2_model fp8") and "{" not in dotted
    short = command("M", ["-sc.gamma", "3"], {"level2_model": "fp8"})
    assert short.endswith("--speculative-config.level2_model fp8") and "{" not in short
    assert command("M", [], {}) == "vllm serve M --speculative-model triforce"


@pytest.mark.parametrize(
    "keys, options, by, words",
    [
        ({"gama": 3}, [], "vllm-triforce", "did you mean 'gamma'"),
        ({"retrieval_budget": -1}, [], "vllm-triforce", "retrieval_budget=-1"),
        ({"kv_offload_gib": 1}, [], "vllm-triforce", "is not supported with Model Runner V1"),
        ({}, ["--pipeline-parallel-size", "2"], "vllm-triforce", "Use tensor parallelism"),
        ({}, ["--max-model-len", "1000000"], "vLLM", "max_model_len"),
    ],
)
def test_what_is_refused(capsys, pair, keys, options, by, words):
    """By whom, in the words of the engine's own error."""
    from vllm.engine.arg_utils import EngineArgs

    code, found = doctor(
        capsys, pair["target"], *OPTIONS, *options, "--speculative-config", json.dumps(keys)
    )
    engine = found["engine"]
    assert code == 1 and not found["runs"]
    assert engine["refused_by"] == by and words in engine["refusal"]
    more = {o[2:].replace("-", "_"): int(v) for o, v in zip(options[::2], options[1::2])}
    with pytest.raises(ValueError) as refused:
        EngineArgs(
            model=pair["target"],
            **{"dtype": "float32", "max_model_len": 8192, **more},
            speculative_config={"method": "triforce", **keys},
        ).create_engine_config()
    assert engine["refusal"] in str(refused.value)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--machine", "abacus"], "no file and none of"),
        (["./no/such/model"], "there is no such folder"),
        (["no/such/model"], "there is no such folder"),
        (
            ["--acceptances", "high"],
            "--acceptances: high is not accepted: input should be a valid number",
        ),
        (
            ["--acceptances", "1.5"],
            "--acceptances: 1.5 is not accepted: input should be less than or equal to 1",
        ),
        (["--max-model-len", "8192"], "comes before MODEL"),
        (["TARGET", "--max-modle-len", "8192"], "'vllm serve --help=all' has the options"),
        (["--report", "no/fault.json"], "cannot be written (No such file or directory)"),
    ],
)
def test_bad_input(capsys, pair, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *(pair["target"] if a == "TARGET" else a for a in arguments)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said
    assert said.startswith("vllm-triforce doctor: error: ") and said.count("\n") == 1


def test_a_model_that_cannot_be_built_without_weights(capsys, monkeypatch, pair):
    """It is not said to run: nobody knows."""
    from vllm_triforce_bench.doctor import layers
    from vllm_triforce_bench.doctor.text import verdict

    def build(vllm_config):
        raise layers.NotBuilt("its code reads weights")

    monkeypatch.setattr(layers, "_build", build)
    code, found = doctor(capsys, pair["target"], *OPTIONS)
    assert code == 3 and found["runs"] is None
    assert "cannot be told" in verdict(found)


def test_other_commands_take_no_more_than_they_name(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab", "MODEL", "--text", "FILE", "--polices", "topk"])
    assert ended.value.code == 2 and "--polices" in capsys.readouterr().err


def test_a_vllm_that_is_not_supported(capsys, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    code, found = doctor(capsys, "anything")
    assert code == 1 and "its version is 0.99.0" in found["installation"]["refusal"]
    assert "engine" not in found


@pytest.mark.parametrize(
    "error, says",
    [
        (RuntimeError("operator torchvision::nms does not exist"), "pip uninstall all three"),
        (ImportError("no such name"), "what would be wrapped: ImportError"),
    ],
)
def test_a_vllm_that_does_not_load_is_told_from_another(capsys, monkeypatch, error, says):
    from vllm_triforce import vllm_patches

    def missing(patches):
        raise error

    monkeypatch.setattr(vllm_patches, "missing", missing)
    code, found = doctor(capsys)
    refusal = found["installation"]["refusal"]
    assert code == 1 and says in refusal
    assert ("pip uninstall" in refusal) == isinstance(error, RuntimeError)


def test_a_plugin_that_is_switched_off(capsys, monkeypatch):
    from vllm import envs

    envs.disable_envs_cache()  # an engine of another test in this process may have begun it
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    code, found = doctor(capsys)
    assert code == 1 and "VLLM_PLUGINS=another" in found["installation"]["refusal"]


def test_as_text(pair):
    """What a user sees, in a process of its own: nothing of vLLM's log among it."""
    given = ("doctor", pair["target"], "--machine", "H200")
    lines = child.run(sys.executable, "-m", "vllm_triforce.cli", *given).stdout.splitlines()
    assert lines[0].startswith("vllm-triforce") and lines[-1] == "TriForce would run."
    starts = {line.split("  ")[0] for line in lines}
    assert {"vLLM", "model runner", "layers", "KV cache", "beside them", "level 2"} <= starts
    assert {"requests x tokens", "1 x 4,096", "choose"} <= starts
    assert not any("INFO" in line or "WARNING" in line for line in lines)


def test_a_report_names_nothing_private(capsys, pair, tmp_path, monkeypatch):
    """Of a model that runs, and of refusals, which quote what was given."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    path, secrets = tmp_path / "fault.json", [str(Path.home()), str(tmp_path), "s3cret"]

    def report(*arguments: str) -> dict:
        main(["doctor", *arguments, "--report", str(path)])
        text = path.read_text()
        for secret in (*secrets, pair["target"], pair["draft"], "acme", "nowhere"):
            assert secret not in text, text
        return json.loads(text)

    keys = json.dumps({"method": "triforce", "model": pair["draft"], "gamma": 3})
    found = report(pair["target"], *OPTIONS, "--speculative-config", keys)
    assert found["engine"]["model"] == "<model>" and found["engine"]["draft"] == "<draft>"
    assert found["engine"]["architecture"] == "LlamaForCausalLM"
    assert found["engine"]["settings"]["gamma"] == 3 and found["layers"]["retrieve"]
    assert "VLLM_API_KEY" in found["variables"]
    for draft in ("acme/draft", "nowhere"):
        keys = json.dumps({"method": "triforce", "model": draft})
        refused = report(pair["target"], *OPTIONS, "--speculative-config", keys)
        assert "draft model '<given>'" in refused["engine"]["refusal"]


# What a message may quote, and what of it may be seen.
MESSAGES = {
    "draft model 'secret' is not a folder": "draft model '<given>' is not a folder",
    "models/hidden/config.json is bad": "<private> is bad",
    "model acme-hidden-7b not found": "model <given> not found",
    "<class 'transformers_modules.acme.hidden.Config'>": "<class '<private>'>",
    "token hf_abcdefghijkl is bad": "token <private> is bad",
    "Pool(host='hf.corp.internal', port=443): url: /acme/hidden": "Pool(host=<private>, port=443): "
    "url: <private>",
    "10.1.2.3:3128 refused": "<private> refused",
    "no /data/a,b/My Models/x": "no <private>",
    "https://[fe80::1]:8000 refused": "<private> refused",
    "the draft of the target has no tokenizer": "the draft of the target has no tokenizer",
    "key 'gama' is unknown; did you mean 'gamma'?": "key 'gama' is unknown; did you mean 'gamma'?",
    "vllm_triforce.worker.cpu.Worker": "vllm_triforce.worker.cpu.Worker",
    "16.3 tokens/s": "16.3 tokens/s",
}


def test_a_report_keeps_what_is_nobodys(tmp_path):
    """Models in folders that are called target and draft hide no words."""
    engine = {"model": "target", "draft": "draft", "dtype": "bfloat16", "warnings": [*MESSAGES]}
    engine["settings"] = {"level2_model": "bfloat16"}
    keys = json.dumps({"model": "draft", "level2_model": "secret"})
    argv = ["target", "--speculative-config", keys, "--tokenizer=/srv/models/acme-hidden-7b"]
    prediction = {"choice": {"keys": [], "command": "vllm serve target --tokenizer acme"}}
    results = {"engine": engine, "prediction": prediction}
    write_report(tmp_path / "fault.json", results, argv)
    report = json.loads((tmp_path / "fault.json").read_text())
    found = report["engine"]
    assert report["prediction"] == {"choice": {"keys": []}}
    assert found["warnings"] == [*MESSAGES.values()]
    assert found["settings"] == {"level2_model": "bfloat16"} and found["dtype"] == "bfloat16"
