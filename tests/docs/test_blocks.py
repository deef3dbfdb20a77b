"""Promise: what the pages tell a reader to type works.

Python is run, on the embedded pair. Commands of ``vllm serve`` are read by vLLM's parser and the
engine's configuration is made; our own commands are read by their parsers, and options of other
scripts must be in their help: what runs for minutes is run by other tests with smaller numbers
(``tests/bench``, ``tests/examples``). A command that nothing here knows is a failure.
"""

import functools
import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.child import run
from tests.docs.named_models import write_named_models
from tests.models import PAIR, PROMPTS, ROOT
from tests.one_process import allow_many_engines

pytestmark = pytest.mark.slow

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
# What a reader fills in, and what a test does.
PLACES = {
    "TARGET": str(PAIR / "target"),
    "DRAFT": str(PAIR / "draft"),
    "FILE": str(PROMPTS / "held_out.txt"),
    "FOLDER": "results",
}


@dataclass(frozen=True)
class Block:
    """
    Args:
        page: below the project's root.
        line: of its first line of code, from 1.
    """

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def filled(self) -> str:
        """Return the code with the embedded pair for the names that a reader fills in."""
        return re.sub(rf"\b({'|'.join(PLACES)})\b(?!=)", lambda found: PLACES[found[0]], self.code)

    @property
    def commands(self) -> list[list[str]]:
        """Split a ``bash`` block into commands, without comments and variables."""
        text = self.filled.replace("\\\n", " ")
        found = []
        for line in _lines(text):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0], re.S):
                words = words[1:]
            if words:
                found.append(words)
        return found


def _lines(text: str) -> list[str]:
    """Split commands; one goes on where a quote is open."""
    found, open_line = [], ""
    for line in text.splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        try:
            shlex.split(open_line, comments=True)
        except ValueError:
            continue
        found.append(open_line)
        open_line = ""
    if open_line:
        raise ValueError(f"a quote is not closed: {open_line}")
    return found


def pages() -> list[Path]:
    docs = (ROOT / "docs").rglob("*.md")
    others = ("README.md", "CONTRIBUTING.md", "patches/README.md", "examples/README.md")
    more = (ROOT / "examples").glob("*/README.md")
    return sorted({*docs, *(ROOT / name for name in others), *more})


def blocks() -> list[Block]:
    found = []
    for path in pages():
        text, page = path.read_text(), str(path.relative_to(ROOT))
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
            found.append(Block(page, line, match[2], code))
    return found


BLOCKS = blocks()
LANGUAGES = {"bash", "python", "json", "yaml", "promql", "text", "diff"}
# Needs what a machine for tests lacks.
NOT_RUN = {
    "docker": "a container engine",
    "curl": "a server; tests/examples asks one",
    "kubectl": "a cluster; tests/examples/test_deployment.py reads the manifests",
    "git": "a place to clone from",
    "apt-get": "the rights of root",
}


def of(language: str) -> list:
    """List the blocks of a language, each code once."""
    once = {b.filled: b for b in reversed(BLOCKS) if b.language == language}
    return [pytest.param(b, id=str(b)) for b in reversed(once.values())]


def test_every_block_has_a_language():
    assert len(BLOCKS) > 20
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block} has language {block.language!r}"


@pytest.mark.parametrize("block", of("json"))
def test_json(block: Block):
    assert json.loads(block.filled) is not None


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml(block: Block):
    assert yaml.safe_load(block.filled) is not None


@pytest.mark.engine
@pytest.mark.parametrize("block", of("python"))
def test_python(block: Block, engines, tmp_path, monkeypatch, capsys):
    """Run the block without vLLM's compilation; each prints what it is about."""
    import vllm

    engines.clear()
    allow_many_engines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, enforce_eager=True))
    exec(compile(block.filled, str(block), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def named_models(tmp_path_factory) -> dict[str, str]:
    return write_named_models(tmp_path_factory.mktemp("named"))


@pytest.mark.parametrize("block", of("bash"))
def test_commands(block: Block, named_models):
    assert block.commands, block
    for words in block.commands:
        for name, folder in named_models.items():
            words = [word.replace(name, folder) for word in words]
        check(words)


def check(words: list[str]) -> None:
    """
    Raises:
        AssertionError: nobody knows the command, or it is not one that works.
    """
    program, arguments = Path(words[0]).name.removesuffix("3"), words[1:]
    if words[0].startswith("./"):
        program, arguments = "bash", words
    elif (program, *arguments[:1]) == ("vllm", "serve"):
        program, arguments = "vllm serve", arguments[1:]
    elif arguments[:2] in (["-m", "pip"], ["-m", "pytest"]):
        program, arguments = arguments[1], arguments[2:]
    if program not in NOT_RUN:
        assert program in CHECKS, f"nothing here knows the command {words}"
        CHECKS[program](arguments)


def check_serve(arguments: list[str]) -> None:
    """Parse the server's options and make the engine's configuration."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_triforce.plugin import register

    register()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    args.model = args.model_tag or args.model
    engine_args = EngineArgs.from_cli_args(args)
    keys = engine_args.speculative_config or {}
    if "kv_offload_gib" in keys:  # on Model Runner V2, which is a GPU's
        from vllm_triforce.config import TriForceConfig

        ours = {k: v for k, v in keys.items() if k not in ("method", "model")}
        TriForceConfig.from_speculative_config(ours)
    else:
        config = engine_args.create_engine_config()
        assert not keys or "triforce" in config.additional_config


def check_lm_eval(arguments: list[str]) -> None:
    """Check keys, options of the engine and tasks of ours."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_triforce.config import TriForceConfig

    given = dict(pairwise(arguments))
    model_args = json.loads(given["--model_args"])
    assert set(model_args) - {"pretrained"} <= set(EngineArgs.__dataclass_fields__)
    keys = {"method": "triforce"} | model_args.get("speculative_config", {})
    assert keys.pop("method") == "triforce"
    keys.pop("model", None)
    TriForceConfig.from_speculative_config(keys)
    if folder := given.get("--include_path"):
        assert (ROOT / folder / f"{given['--tasks']}.yaml").is_file()


def check_ours(arguments: list[str]) -> None:
    from vllm_triforce import cli

    if arguments and arguments[0].startswith("-"):
        return
    command = cli.COMMANDS[arguments[0]]
    known = help_of(sys.executable, "-m", "vllm_triforce.cli", arguments[0], "--help")
    for option in options(arguments[1:]):
        assert option in known or command.takes_more, f"{arguments[0]} has no {option}"


def check_make(arguments: list[str]) -> None:
    run("make", "-n", *(a for a in arguments if not a.startswith("ARGS=")))


def check_shell(arguments: list[str]) -> None:
    run("bash", "-n", ROOT / arguments[0])


def check_pip(arguments: list[str]) -> None:
    """Check that local projects and named extras exist."""
    setup = (ROOT / "setup.cfg").read_text()
    for name in (a for a in arguments if a != "pip" and not a.startswith("-")):
        found = re.fullmatch(r"(\.|\S*\.whl|vllm-triforce)(?:\[([\w,-]+)\])?", name)
        for extra in (found[2] or "").split(",") if found else ():
            assert not extra or f"\n{extra} =" in setup, f"no extra {extra}"
        if name.startswith("./"):
            assert (ROOT / name).exists(), name


BRACES = re.compile(r"\{([\w,]+)\}")  # a script's commands


def check_script(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return
    what = arguments[:2] if arguments[0] == "-m" else arguments[:1]
    if what[0] != "-m":
        assert (ROOT / what[0]).exists(), what
    if what[0] == "-m" and not what[1].startswith(("tests", "vllm_triforce", "examples")):
        return
    if given := options(arguments[len(what) :]):
        known = help_of(sys.executable, *what, "--help")
        if (command := arguments[len(what)]) in re.findall(r"\w+", "".join(BRACES.findall(known))):
            known = help_of(sys.executable, *what, command, "--help")
        for option in given:
            assert option in known, f"{' '.join(what)} has no {option}"


def check_paths(arguments: list[str]) -> None:
    """Check that named paths exist."""
    for path in (a.split("::")[0] for a in arguments):
        if path.startswith(("tests/", "docs/", "examples/", "tools/", "vllm_triforce")):
            assert (ROOT / path).exists(), path


def options(arguments: list[str]) -> list[str]:
    return [a.split("=")[0] for a in arguments if re.match(r"--\w", a)]


@cache
def help_of(*command: str) -> str:
    return run(*command).stdout


CHECKS = {
    "vllm serve": check_serve,
    "vllm-triforce": check_ours,
    "make": check_make,
    "lm_eval": check_lm_eval,
    **dict.fromkeys(("pip", "uv"), check_pip),
    "python": check_script,
    **dict.fromkeys(("bash", "sh"), check_shell),
    **dict.fromkeys(["pytest", "ruff", "mypy", "cd", "rm", "export", "vllm", "diff"], check_paths),
}
