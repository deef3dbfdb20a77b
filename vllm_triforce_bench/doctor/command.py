"""Arguments of ``vllm-triforce doctor``, and the checks in order."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vllm_triforce_bench.options import CommaList, NotNegative, Share, checked
from vllm_triforce_bench.predict.machine import MACHINES, Machine, named_machine
from vllm_triforce_bench.predict.settings import Acceptance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "vllm-triforce doctor [MODEL] [--json] [--report FILE] [--machine NAME] [options of "
        "vllm serve]\n"
        "       vllm-triforce doctor --url URL [--seconds N] [--json] [--report FILE]"
    )
    parser.epilog = (
        "All options of 'vllm serve' that describe the engine are understood, behind MODEL; "
        "--speculative-config takes TriForce's keys. Exit code: 0 where TriForce would run, 1 "
        "where it would not, 2 for bad input, 3 where it cannot be told without weights."
    )
    add = parser.add_argument
    add("model", nargs="?", help="path or hub name of the target; without, the installation alone")
    add("--json", action="store_true", help="print all results as JSON")
    add(
        "--report",
        type=Path,
        metavar="FILE",
        help="write the results to report a fault, without names of models, paths and addresses "
        "as far as they are recognised",
    )
    add(
        "--machine",
        help=f"for the prediction: {', '.join(MACHINES)} or a JSON file (docs/doctor.md); default: "
        "the GPU of this machine if it is one of them, or this CPU, measured",
    )
    shares = checked(CommaList[Share])
    add("--acceptances", type=shares, default="0.7,0.9", help="of level 2, for the prediction")
    add("--url", help="a running server: what speculation does there, and what to change")
    add(
        "--seconds",
        type=checked(NotNegative),
        default=0,
        help="of that server's traffic; 0: since its start",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if TriForce would run, 1 if it would not, 3 if that is unknown without weights."""
    # Keep vLLM's log out of the report; its errors are part of the results.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    if args.url is not None:
        return _run_server(args)
    if args.seconds:
        args.fail("--seconds is of a running server's traffic; give --url")
    try:
        machine = named_machine(args.machine) if args.machine else None
    except ValueError as error:
        args.fail(str(error))
    if args.more and (
        not args.model or args.argv.index(args.more[0]) < args.argv.index(args.model)
    ):
        args.fail(f"{args.more[0]} comes before MODEL; give the model, then the engine's options")
    acceptances = [Acceptance(share) for share in args.acceptances]
    results = examine(args.model, args.more, machine, acceptances, args.fail)
    from vllm_triforce_bench.doctor.text import lines

    _show(args, results, lines)
    return {True: 0, False: 1, None: 3}[results["runs"]]


def _run_server(args: argparse.Namespace) -> int:
    """Return 0 if TriForce runs on the server, else 1."""
    from vllm_triforce_bench.doctor.server import BadServer, examine_server
    from vllm_triforce_bench.doctor.server_text import lines

    if args.model is not None or args.more or args.machine is not None:
        args.fail("--url is of a running server; leave out MODEL, --machine and engine options")
    try:
        results = examine_server(args.url, args.seconds)
    except BadServer as error:
        args.fail(str(error))
    _show(args, results, lines)
    return 0 if results["runs"] else 1


def _show(args: argparse.Namespace, results: dict[str, Any], lines: Callable) -> None:
    """Print the results, and write the file of ``--report``."""
    print(json.dumps(results, indent=1) if args.json else "\n".join(lines(results)))
    if args.report is not None:
        from vllm_triforce_bench.doctor.report import write_report

        try:
            write_report(args.report, results, args.argv)
        except OSError as error:
            args.fail(f"--report {args.report} cannot be written ({error.strerror})")


def examine(
    model: str | None,
    options: list[str],
    machine: Machine | None,
    acceptances: list[Acceptance],
    fail: Callable[[str], NoReturn],
) -> dict[str, Any]:
    """Check the installation, then the model with these options, as far as checks succeed.

    Args:
        options: options of ``vllm serve`` for the engine.
        machine: machine of the prediction; None for this one.
        acceptances: acceptances of level 2.
        fail: takes the message of bad input, and does not return.

    Returns:
        The content of ``--json``.
    """
    from vllm_triforce_bench.doctor.installation import installation

    results: dict[str, Any] = {"installation": installation()}
    results["runs"] = results["installation"]["refusal"] is None
    if model is None or not results["runs"]:
        return results
    if _looks_local(model) and not os.path.isdir(os.path.expanduser(model)):
        fail(f"MODEL {model!r}: there is no such folder; give a model's folder or its hub name")
    from vllm_triforce.core.kv_groups import NO_SPARSE_LAYER
    from vllm_triforce_bench.doctor.engine import BadOptions, engine

    try:
        results["engine"], vllm_config = engine(model, options)
    except BadOptions as error:
        fail(f"{error}; 'vllm serve --help=all' has the options of the engine")
    results["runs"] = vllm_config is not None
    if vllm_config is None:
        return results
    from vllm_triforce_bench.doctor.layers import NotBuilt, layers_of
    from vllm_triforce_bench.doctor.memory import level2_model_bytes, memory
    from vllm_triforce_bench.doctor.prediction import predict

    try:
        layers = layers_of(vllm_config)
        copy_bytes = level2_model_bytes(vllm_config, layers)
    except NotBuilt as error:
        results["layers"] = {"error": str(error)}
        results["runs"] = None
        return results
    results["layers"] = layers.to_dict()
    results["runs"] = bool(layers.retrieving) or results["engine"]["is_plain"]
    if not results["runs"]:
        results["layers"]["refusal"] = NO_SPARSE_LAYER
        return results
    results["memory"] = memory(vllm_config, layers, copy_bytes)
    results["prediction"] = predict(
        vllm_config, layers, copy_bytes, machine, acceptances, _print_progress
    )
    results["prediction"]["is_asked_for"] = machine is not None
    return results


def _looks_local(model: str) -> bool:
    """True if the name is a folder's: names of the hub have one slash at most."""
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr)
