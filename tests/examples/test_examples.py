"""Promise: the examples do what they say, on the embedded pair with small sizes, in processes of
their own as a reader starts them. Clients share one server."""

import json
import os
import re
import runpy
import shlex
import shutil
import sys

import pytest

from tests import child
from tests.models import ROOT
from tests.one_process import allow_many_engines
from tests.serving import serve
from tests.v2.environment import needs_interpreter, v2_environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
KEYS = {"min_context": 0, "adaptive": False}
SMALL = ["--context", "1200", "--max-tokens", "24", "--budget", "512", "--eager"]
FIGURES = r"Level 2: (\d+) of (\d+) tokens accepted"


def run(*command, env: dict | None = None, code: int = 0) -> str:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **(env or {})}
    done = child.run(*command, code=code, env=env, timeout=400)
    return done.stdout + done.stderr


def documented() -> tuple[list[str], dict[str, str]]:
    """Read arguments and variables of the server in getting-started.md."""
    page = (ROOT / "docs" / "getting-started.md").read_text()
    command = re.search(r"^(VLLM_CPU\S+ .*?serve examples/.*?)\n```", page, re.M | re.S)[1]
    words = shlex.split(re.sub(r"\bexamples/", f"{EXAMPLES}/", command.replace("\\\n", " ")))
    begin = words.index("serve")
    return words[begin + 1 :], dict(word.split("=", 1) for word in words[: begin - 1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start the documented server, without the controller, as these texts are short."""
    (target, *options), variables = documented()
    options += ["--distributed-executor-backend", "uni"]  # a process less that imports vLLM
    place = options.index("--speculative-config") + 1
    options[place] = json.dumps(json.loads(options[place]) | KEYS)
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(target, log, *options, **variables) as server:
        yield server
        counted = server.metrics()
        assert counted["vllm:triforce_level2_accepted_tokens_total"] > 0


@pytest.fixture(scope="module")
def address(server) -> str:
    return f"{server.address}/v1"


@pytest.fixture
def run_here(monkeypatch, capsys, engines):
    """Run an example in this process: another takes a while to import vLLM."""

    def run_script(name: str, *arguments) -> str:
        engines.clear()
        allow_many_engines()
        script = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_offline(run_here):
    said = run_here("offline.py", *SMALL, "--keys", json.dumps(KEYS))
    accepted, drafted = map(int, re.search(FIGURES, said).groups())
    assert 0 < accepted <= drafted
    assert "temperature 0," in said and "temperature 0.8," in said


def test_client(address):
    script = EXAMPLES / "openai_client.py"
    said = run(sys.executable, script, "--base-url", address, "--max-tokens", "16")
    assert re.search(r"target: \d{4} tokens in, 16 out", said), said


def test_questions_about_a_long_document(server, address):
    """From the second question on the document is in the prefix cache."""
    hits = "vllm:prefix_cache_hits_total"
    before = server.metrics()[hits]
    script = EXAMPLES / "long_document_chat.py"
    given = ("--base-url", address, "--characters", "12000", "--max-tokens", "16")
    said = run(sys.executable, script, *given)
    sizes = re.findall(r"(\d+) tokens in, 16 out: first token after [\d.]+ s", said)
    assert len(sizes) == 3
    assert server.metrics()[hits] - before > 0.9 * sum(map(int, sizes[1:]))


def test_questions_without_a_server(run_here):
    models = EXAMPLES / "models"
    given = ("--target", models / "target", "--draft", models / "draft", "--dtype", "float32")
    sizes = ("--max-model-len", "8192", "--characters", "6000", "--max-tokens", "16", "--eager")
    said = run_here("long_document_chat.py", *given, *sizes)
    assert len(re.findall(r"\d+ tokens in, 16 out: [\d.]+ s", said)) == 3, said


def test_a_policy_of_ones_own(tmp_path):
    keys = json.dumps(KEYS | {"selection": "blend"})
    command = (sys.executable, EXAMPLES / "offline.py", *SMALL, "--keys", keys)
    source = tmp_path / "custom_policy"
    shutil.copytree(EXAMPLES / "custom_policy", source)
    uv = shutil.which("uv", path=os.path.dirname(sys.executable))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--python", sys.executable)
    run(uv, "pip", "install", *options, "--target", tmp_path / "installed", source)
    said = run(*command, env={"PYTHONPATH": str(tmp_path / "installed")})
    assert re.search(FIGURES, said), said


def test_offload_is_refused_where_it_cannot_run(monkeypatch):
    script = EXAMPLES / "offload.py"
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(script), run_name="__main__")
    assert "This cannot run here." in refused.value.code
    assert "Model Runner V1" in refused.value.code


@pytest.mark.thorough
@needs_interpreter
def test_offload():
    """Run under Triton's interpreter."""
    sizes = ["--context", "300", "--max-tokens", "10", "--budget", "128", "--eager"]
    keys = json.dumps(KEYS | {"retrieval_recent_tokens": 32, "max_speculating_seqs": 1})
    sizes += ["--dtype", "float32", "--block-size", "32", "--gib", "0.01", "--device-gib", "0.003"]
    env = {**v2_environment(), "VLLM_CPU_KVCACHE_SPACE": "1"}
    said = run(sys.executable, EXAMPLES / "offload.py", *sizes, "--keys", keys, env=env)
    assert float(re.search(r"full passes: ([\d.]+) GB", said)[1]) > 0
    assert re.search(FIGURES, said), said


@pytest.mark.thorough
def test_benchmark_of_ones_own_model(tmp_path):
    """Run the first of three measurements, which take the same options."""
    env = {"SMALL": "1", "STEPS": "lab", "OUTPUT": str(tmp_path)}
    env["VLLM_TRIFORCE"] = os.path.join(os.path.dirname(sys.executable), "vllm-triforce")
    said = run("bash", EXAMPLES / "benchmark_your_model.sh", env=env)
    assert (tmp_path / "lab" / "report.html").is_file(), said


def test_a_step_of_the_benchmark_that_does_not_exist():
    env = {"STEPS": "lob"}
    assert "STEPS has 'lob'" in run("bash", EXAMPLES / "benchmark_your_model.sh", env=env, code=2)
