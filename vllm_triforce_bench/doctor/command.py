"""``vllm-triforce doctor [MODEL]``: the arguments, and what is looked at in which order."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from vllm_triforce_bench.predict.machine import Machine, named_machine
from vllm_triforce_bench.predict.settings import Acceptance, shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "vllm-triforce doctor [MODEL] [--json] [--machine NAME] [options of vllm serve]"
    parser.epilog = (
        "All options of 'vllm serve' that describe the engine are understood, behind MODEL; "
        "--speculative-config takes TriForce's keys. Exit code: 0 where TriForce would run, 1 "
        "where it would not, 2 for bad input, 3 where it cannot be told without weights."
    )
    add = parser.add_argument
    add("model", nargs="?", help="path or hub name of the target; without, the installation alone")
    add("--json", action="store_true", help="all that was found, as JSON")
    add(
        "--machine",
        help="for the prediction: a name or file, as of 'vllm-triforce predict'; default: the GPU "
        "if it has a name there, or this CPU, measured",
    )
    add("--acceptances", default="0.7,0.9", help="of level 2, for the prediction")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where TriForce would run, 1 where it would not, 3 where that cannot be told."""
    # What is printed is ours alone; vLLM's own errors are reported with what was found.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    try:
        acceptances = [Acceptance(a) for a in shares("--acceptances", args.acceptances)]
        machine = named_machine(args.machine) if args.machine else None
    except ValueError as error:
        args.fail(str(error))
    if args.more and (
        not args.model or args.argv.index(args.more[0]) < args.argv.index(args.model)
    ):
        args.fail(f"{args.more[0]} comes before MODEL; give the model, then the engine's options")
    found = examine(args.model, args.more, machine, acceptances, args.fail)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        from vllm_triforce_bench.doctor.text import lines

        print("\n".join(lines(found)))
    return {True: 0, False: 1, None: 3}[found["runs"]]


def examine(
    model: str | None,
    options: list[str],
    machine: Machine | None,
    acceptances: list[Acceptance],
    fail: Callable[[str], NoReturn],
) -> dict[str, Any]:
    """All that is found, as JSON has it.

    Args:
        options: of ``vllm serve``, for the engine.
        machine: that is predicted for; None: this one.
        acceptances: of level 2.
        fail: takes the message of bad input, and does not return.
    """
    from vllm_triforce_bench.doctor.installation import installation

    found: dict[str, Any] = {"installation": installation()}
    found["runs"] = found["installation"]["refusal"] is None
    if model is None or not found["runs"]:
        return found
    if _looks_local(model) and not os.path.isdir(os.path.expanduser(model)):
        fail(f"MODEL {model!r}: there is no such folder; give a model's folder or its hub name")
    from vllm_triforce.core.kv_groups import NO_SPARSE_LAYER
    from vllm_triforce_bench.doctor.engine import BadOptions, engine

    try:
        found["engine"], vllm_config = engine(model, options)
    except BadOptions as error:
        fail(f"{error}; 'vllm serve --help=all' has the options of the engine")
    found["runs"] = vllm_config is not None
    if vllm_config is None:
        return found
    from vllm_triforce_bench.doctor.layers import NotBuilt, layers_of
    from vllm_triforce_bench.doctor.memory import memory
    from vllm_triforce_bench.doctor.pays import pays

    try:
        layers = layers_of(vllm_config)
    except NotBuilt as error:
        found["layers"] = {"error": str(error)}
        found["runs"] = None
        return found
    found["layers"] = layers.found()
    found["runs"] = bool(layers.retrieving) or found["engine"]["is_plain"]
    if not found["runs"]:
        found["layers"]["refusal"] = NO_SPARSE_LAYER
        return found
    found["memory"] = memory(vllm_config, layers)
    found["prediction"] = pays(vllm_config, layers, machine, acceptances, _say)
    found["prediction"]["is_asked_for"] = machine is not None
    return found


def _looks_local(model: str) -> bool:
    """Whether it is the name of a folder: on the hub there is at most one slash."""
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1


def _say(line: str) -> None:
    print(line, file=sys.stderr)
