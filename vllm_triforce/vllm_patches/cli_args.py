"""Patches of vLLM's command line: its flags for speculation accept the method ``triforce``."""

import argparse
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_triforce.config.keys import METHOD
from vllm_triforce.vllm_patches.patch import patch

# vLLM's flags for speculation: attribute of EngineArgs, and key of speculative_config.
FLAGS = {
    "--spec-method": ("spec_method", "method"),
    "--spec-model": ("spec_model", "model"),
    "--spec-tokens": ("spec_tokens", "num_speculative_tokens"),
}

# Attribute of errors that TriForce's checks raised.
_MARK = "is_triforce_refusal"


@contextmanager
def refusing() -> Iterator[None]:
    """Mark a ``ValueError`` raised inside as a refusal and raise it again."""
    try:
        yield
    except ValueError as error:
        setattr(error, _MARK, True)
        raise


def is_refusal(error: BaseException) -> bool:
    return getattr(error, _MARK, False)


@functools.cache
def print_refusals_alone() -> None:
    """Print a refusal that ends the process without its traceback; leave other errors alone.

    It goes to stderr in argparse's form, as vLLM's own errors of arguments do: a log may be off.
    """
    previous_hook = sys.excepthook

    def print_error(kind, error, traceback) -> None:
        if is_refusal(error):
            print(f"vllm-triforce: error: {error}", file=sys.stderr)
        else:
            previous_hook(kind, error, traceback)

    sys.excepthook = print_error


class _WholeFlag(str):
    """Flag without abbreviations: those of vLLM's ``--speculative-config`` stay its own."""

    def startswith(self, *args) -> bool:
        """Return False: argparse finds the flags that an abbreviation may mean by it."""
        return False


_FLAG = _WholeFlag("--speculative-model")

# Condition of the ledger under which patches can be deleted.
REGISTRY = "vLLM has a registry of out-of-tree speculative methods"

_CLI_HELP = (
    "Speculate with TriForce, hierarchical speculative decoding for long sequences, with its "
    "default settings and prompt lookup as level 1. Settings, and a draft model, go into "
    '--speculative-config \'{"method": "triforce", ...}\'; --spec-model and --spec-tokens are two '
    "of them."
)


@patch(
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    "parser",
    why="adds `--speculative-model triforce`, and `triforce` to the choices of `--spec-method`",
    until=REGISTRY,
)
def _add_cli_args(original, parser, *args, **kwargs):
    parser = original(parser, *args, **kwargs)
    if _FLAG in parser._option_string_actions:  # a script's own
        return parser
    group = parser.add_argument_group(title="TriForce", description="vllm-triforce")
    # Scripts pass all parsed arguments on, as in ``LLM(**vars(args))``: not given, no argument.
    group.add_argument(_FLAG, choices=[METHOD], default=argparse.SUPPRESS, help=_CLI_HELP)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, METHOD]
    return parser


@patch(
    "vllm.engine.arg_utils:EngineArgs.from_cli_args",
    "cls, args",
    why="turns the flag into `speculative_config`; an engine with a refused setting ends with its "
    "message alone, without a traceback",
    until=REGISTRY,
)
def _from_cli_args(original, cls, args):
    engine_args = original(cls, args)
    is_flag_given = getattr(args, "speculative_model", None) == METHOD
    if is_flag_given or uses_triforce(engine_args):
        print_refusals_alone()
    if is_flag_given:
        with refusing():
            engine_args.speculative_config = _keys_beside_flag(engine_args)
        # With several API servers, each process builds its engine arguments from ``args``. It
        # loads plugins only while it does so.
        args.speculative_config = engine_args.speculative_config
    return engine_args


def _keys_beside_flag(engine_args) -> dict[str, Any]:
    keys = _given_keys(engine_args, f"--speculative-model {METHOD}")
    for flag, method in (
        ("--speculative-config with method", keys.get("method", METHOD)),
        ("--spec-method", engine_args.spec_method or METHOD),
    ):
        if method != METHOD:
            raise ValueError(
                f"--speculative-model {METHOD} and {flag} {method!r} exclude each other. Drop one "
                "of them."
            )
    return keys if engine_args.spec_method else {"method": METHOD, **keys}


def _given_keys(engine_args, flag: str) -> dict[str, Any]:
    """Copy the keys of --speculative-config, or refuse a value that is no JSON object."""
    given = engine_args.speculative_config
    if given is not None and not isinstance(given, dict):
        raise ValueError(
            f"--speculative-config {given!r} is not supported with {flag}: it is no JSON object. "
            "Use --speculative-config '{\"KEY\": VALUE}' with TriForce's keys, or leave it out."
        )
    return dict(given or {})


def uses_triforce(engine_args) -> bool:
    keys = engine_args.speculative_config
    is_in_keys = isinstance(keys, dict) and keys.get("method") == METHOD
    return engine_args.spec_method == METHOD or is_in_keys


def merge_flags(engine_args) -> dict[str, Any]:
    """Merge vLLM's flags into the keys of --speculative-config, as vLLM does for its methods."""
    keys = _given_keys(engine_args, f"--spec-method {METHOD}")
    for flag, (name, key) in FLAGS.items():
        if (value := getattr(engine_args, name)) is None:
            continue
        if key in keys or key.replace("_", "-") in keys:
            raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
        keys[key] = value
    return keys


@contextmanager
def name_flags_in_refusals(engine_args) -> Iterator[None]:
    """Prefix refusals of a flag's value with the flag, whose key has another name."""
    values = {flag: (key, getattr(engine_args, name)) for flag, (name, key) in FLAGS.items()}
    del values["--spec-method"]  # many refusals of other keys suggest to drop method='triforce'
    try:
        yield
    except ValueError as error:
        text = str(error)
        for flag, (key, value) in values.items():
            is_named = f"{key}={value!r}" in text or f"{key} {value!r}" in text
            if value is not None and is_named and is_refusal(error) and not text.startswith("--"):
                error.args = (f"{flag}: {text}",)
                break
        raise
