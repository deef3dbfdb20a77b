"""``vllm-triforce predict``: what steps take, by arithmetic (docs/prediction.md)."""

import argparse
import json
from pathlib import Path

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import MODELS, Geometry
from vllm_triforce_bench.predict.machine import MACHINES, Machine
from vllm_triforce_bench.predict.paper import paper_table
from vllm_triforce_bench.predict.settings import Acceptance, settings
from vllm_triforce_bench.predict.table import cells, markdown

_ACCEPTANCES = "0.6,0.7,0.8,0.9,0.95"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--machines", default=",".join(MACHINES), help="names, or files of --measure-machine")
    add("--models", default=",".join(MODELS), help="names, or folders with a config.json")
    add("--dtype", help="of models that are read from a folder, instead of what is in it")
    add("--contexts", default="4K,8K,16K,32K,64K,122000", help="tokens; 4K is 4096")
    add("--batch-sizes", default="1,4,16,64")
    add("--acceptances", default=_ACCEPTANCES, help="of level 2, with a budget of 4,096 tokens")
    add("--draft-acceptance", type=float, default=0.5, help="of the draft's tokens, by level 2")
    add("--lookup-acceptance", type=float, default=0.3, help="of prompt lookup's, by level 2")
    add("--lengths", default="1,2,3,4,6,8,12,16", help="of proposals, in tokens, to choose from")
    add("--gammas", default="0,1,2,3,4", help="tokens of level 1 for a pass of level 2")
    add("--budgets", default="512,1024,2048,4096", help="tokens that level 2 reads")
    add("--counts", type=Path, help="JSON file with counted launches (predict/counts.py)")
    add("--format", choices=("markdown", "json"), default="markdown")
    add("--output", type=Path, help="file, instead of the terminal")
    add("--paper", action="store_true", help="the paper's own cells beside predictions of them")
    add(
        "--measure-machine",
        type=Path,
        metavar="FILE",
        help="measure this CPU's bandwidth, arithmetic and cost of an operation, and write them",
    )
    add(
        "--measure-passes",
        type=Path,
        metavar="FILE",
        help="time real passes in vLLM on this CPU, about 10 minutes, and write them",
    )
    add("--quick", action="store_true", help="of --measure-passes: a rehearsal with a tiny model")
    add(
        "--validate",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="set measured passes beside those predicted for the one machine in --machines",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0; bad input is said before anything is computed."""
    try:
        text = _text(args)
    except ValueError as error:
        args.fail(str(error))
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)
    return 0


def _text(args: argparse.Namespace) -> str:
    if args.measure_machine:
        from vllm_triforce_bench.predict.constants import measure_machine

        return measure_machine(args.measure_machine)
    if args.measure_passes:
        from vllm_triforce_bench import preload
        from vllm_triforce_bench.predict.measure import measure_passes

        preload.restart_if_needed(args.argv)
        return measure_passes(args.measure_passes, args.quick)
    counts = Counts.load(args.counts) if args.counts else Counts()
    machines = [_machine(name) for name in args.machines.split(",")]
    if args.validate:
        from vllm_triforce_bench.predict.validate import validation

        if len(machines) != 1:
            raise ValueError(
                f"--validate compares with one machine, and --machines has {len(machines)}; give "
                "the file of --measure-machine from where the passes were measured"
            )
        return validation(machines[0], counts, args.validate)
    if args.paper:
        return paper_table(counts)
    found = cells(
        machines,
        [_model(name, args.dtype) for name in args.models.split(",")],
        _numbers("--contexts", args.contexts),
        _numbers("--batch-sizes", args.batch_sizes),
        [
            Acceptance(share, args.draft_acceptance, args.lookup_acceptance)
            for share in _shares(args.acceptances)
        ],
        settings(
            _numbers("--lengths", args.lengths),
            _numbers("--gammas", args.gammas, least=0),
            _numbers("--budgets", args.budgets),
        ),
        counts,
    )
    return json.dumps(found, indent=1) if args.format == "json" else markdown(found)


def _machine(name: str) -> Machine:
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise ValueError(f"machine {name!r} is no file and none of {list(MACHINES)}")
    return Machine.load(Path(name))


def _model(name: str, dtype: str | None) -> Geometry:
    if name in MODELS:
        return MODELS[name]
    if not Path(name).exists():
        raise ValueError(
            f"model {name!r} is none of {list(MODELS)}, and no folder with a config.json"
        )
    return Geometry.load(Path(name), dtype)


def _numbers(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """``4K`` is 4,096, as in ``vllm-triforce bench``."""
    found = []
    for part in text.split(","):
        digits, factor = (part[:-1], 1024) if part[-1:] in ("k", "K") else (part, 1)
        if not digits.isdigit() or int(digits) < least:
            raise ValueError(f"{option} has {part!r}; give whole numbers from {least}, such as 4K")
        found.append(int(digits) * factor)
    return tuple(found)


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--acceptances has {error}; give shares, such as 0.9") from error
