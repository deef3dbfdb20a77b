"""Command ``vllm-triforce``: finds the sub-command and runs it.

A sub-command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. It is imported
only when it runs, so that ``--help`` is fast. For bad input it calls ``args.fail(message)``, which
exits with code 2. ``args.argv`` holds the given arguments.
"""

import argparse
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import NoReturn

from vllm_triforce import __version__


@dataclass(frozen=True)
class Command:
    """Sub-command and its requirements."""

    module: str
    help: str
    needs: tuple[str, ...] = ()
    """Modules that ``pip install vllm-triforce[bench]`` installs."""
    needs_vllm: bool = True
    takes_more: bool = False
    """True if unknown arguments are allowed; they go to ``args.more``."""


COMMANDS = {
    "doctor": Command(
        "vllm_triforce_bench.doctor.command",
        "say what TriForce would do here, and with a model, without loading its weights",
        needs_vllm=False,  # it reports a missing vLLM itself
        takes_more=True,
    ),
    "bench": Command(
        "vllm_triforce_bench.bench.command",
        "compare stock vLLM, its own speculative methods and TriForce, interleaved in one run",
        needs=("rich", "pandas", "matplotlib", "scipy"),
    ),
    "lab": Command(
        "vllm_triforce_bench.lab.command",
        "measure how often a sparse cache agrees with the full one, by policy, budget and context",
        needs=("transformers", "rich", "pandas", "matplotlib"),
        needs_vllm=False,
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with the message alone, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command and return its exit code; 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(
        prog="vllm-triforce",
        description="Tools around TriForce, hierarchical speculative decoding for vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=not command.takes_more,
        )
        subparser.set_defaults(fail=subparser.error)
        if name in argv[:1]:
            try:
                importlib.import_module(command.module).add_arguments(subparser)
            except ValueError as error:  # names added by other packages may clash
                subparser.error(str(error))
    args, more = parser.parse_known_args(argv)
    args.argv, args.more = list(argv), more
    command = COMMANDS[args.command]
    if args.more and not command.takes_more:
        args.fail(f"unrecognized arguments: {' '.join(args.more)}")
    if missing := [name for name in command.needs if not _is_installed(name)]:
        parser.error(
            f"{args.command} needs {', '.join(missing)}, not installed here; "
            f"pip install 'vllm-triforce[bench]'"
        )
    if command.needs_vllm and not _is_installed("vllm"):
        parser.error(
            f"{args.command} needs vLLM, not installed here; pip install 'vllm-triforce[cpu]' on a "
            "machine without a GPU, 'vllm-triforce[gpu]' on one with"
        )
    return importlib.import_module(command.module).run(args)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
