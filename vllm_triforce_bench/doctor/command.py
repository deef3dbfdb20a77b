"""Arguments of ``vllm-triforce doctor``, and the checks in order."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm_triforce_bench.options import BadInput, CommaList, NotNegative, Share, checked
from vllm_triforce_bench.predict.machine import MACHINES, Machine, named_machine


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
    try:
        results = examine(args)
    except BadInput as error:
        args.fail(str(error))
    from vllm_triforce_bench.doctor.report import write_report
    from vllm_triforce_bench.doctor.text import text

    print(json.dumps(results, indent=1) if args.json else text(results))
    if args.report is not None:
        try:
            write_report(args.report, results, args.argv)
        except OSError as error:
            args.fail(f"--report {args.report} cannot be written ({error.strerror})")
    return {True: 0, False: 1, None: 3}[results["runs"]]


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Read a running server, or check the installation, then the model, as far as checks succeed.

    Returns:
        The content of ``--json``.

    Raises:
        BadInput: options do not fit each other, there is no such model or server, or vLLM's parser
            rejects the engine's options.
    """
    if args.url is not None:
        from vllm_triforce_bench.doctor.server import examine_server

        if args.model is not None or args.more or args.machine is not None:
            raise BadInput(
                "--url is of a running server; leave out MODEL, --machine and the engine"
            )
        return examine_server(args.url, args.seconds)
    if args.seconds:
        raise BadInput("--seconds is of a running server's traffic; give --url")
    machine = named_machine(args.machine) if args.machine else None
    if args.more and (
        not args.model or args.argv.index(args.more[0]) < args.argv.index(args.model)
    ):
        raise BadInput(f"{args.more[0]} comes before MODEL; give the model, then such options")
    from vllm_triforce_bench.doctor.installation import installation

    model = args.model
    results: dict[str, Any] = {"installation": installation()}
    results["runs"] = results["installation"]["refusal"] is None
    if model is None or not results["runs"]:
        return results
    # Names of the hub have one slash at most.
    looks_local = model.startswith((".", "~", os.sep)) or model.count("/") > 1
    if looks_local and not os.path.isdir(os.path.expanduser(model)):
        raise BadInput(
            f"MODEL {model!r}: there is no such folder; give a model's folder or its hub name"
        )
    return results | _examine_engine(model, args.more, machine, args.acceptances)


def _examine_engine(
    model: str, options: list[str], machine: Machine | None, acceptances: list[float]
) -> dict[str, Any]:
    """Check the engine, its layers and their memory, and predict its gains."""
    from vllm_triforce.config import read_config
    from vllm_triforce.core.kv_groups import NO_SPARSE_LAYER
    from vllm_triforce_bench.doctor.engine import engine
    from vllm_triforce_bench.doctor.layers import NotBuilt, layers_of, level2_model_bytes, memory
    from vllm_triforce_bench.doctor.prediction import HEAD, command, predict

    facts, vllm_config = engine(model, options)
    results: dict[str, Any] = {"engine": facts, "runs": vllm_config is not None}
    if vllm_config is None or facts["no_level2"] is not None:
        return results
    try:
        layers = layers_of(vllm_config)
        level2_model = read_config(vllm_config)[0].level2_model
        copy_bytes = level2_model_bytes(level2_model, vllm_config, layers)
    except NotBuilt as error:
        return {**results, "layers": {"error": str(error)}, "runs": None}
    results["layers"] = layers.to_dict()
    results["runs"] = bool(layers.retrieving) or facts["is_plain"]
    if not results["runs"]:
        results["layers"]["refusal"] = NO_SPARSE_LAYER
        return results
    results["memory"] = memory(vllm_config, layers, copy_bytes)
    prediction = predict(vllm_config, layers, copy_bytes, machine, acceptances)
    results["prediction"] = prediction
    prediction["is_asked_for"] = machine is not None
    if choice := prediction.get("choice"):
        keys = {each["key"]: each["value"] for each in choice["keys"] if each["value"] != HEAD}
        choice["command"] = command(model, options, keys)
    return results
