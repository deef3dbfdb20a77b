"""``vllm-triforce predict``: what steps take, by arithmetic (docs/prediction.md)."""

import argparse
import json
import shlex
from pathlib import Path

from vllm_triforce_bench.predict.counts import Counts
from vllm_triforce_bench.predict.geometry import MODELS, Geometry
from vllm_triforce_bench.predict.machine import GIB, MACHINES, named_machine
from vllm_triforce_bench.predict.paper import paper_table
from vllm_triforce_bench.predict.settings import Acceptance, settings, shares
from vllm_triforce_bench.predict.table import cells, markdown

# Defaults, and those of --offload.
_DEFAULTS = {
    "machines": ("H200,A100-80GB,RTX-4090", "RTX-4090,H200,GH200"),
    "models": (",".join(MODELS), "llama-2-7b-128k,llama-3.1-8b"),
    "contexts": ("4K,8K,16K,32K,64K,122000", "122K"),
    "batch_sizes": ("1,4,16,64", "1"),
    "acceptances": ("0.6,0.7,0.8,0.9,0.95", "0.93,0.965"),
    "lengths": ("1,2,3,4,6,8,12,16", "8,12,16,24,32"),
    "gammas": ("0,1,2,3,4", "0,2"),
    "budgets": ("512,1024,2048,4096", "4096"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument

    def add_list(name: str, help: str = "") -> None:
        usual, offload = _DEFAULTS[name]
        said = f"default: {usual}; with --offload {offload}"
        option = f"--{name.replace('_', '-')}"
        add(option, default=argparse.SUPPRESS, help=f"{help} ({said})".strip())

    add_list("machines", "names, or files of --measure-machine")
    add_list("models", "names, or folders with a config.json")
    add("--dtype", help="of models that are read from a folder, instead of what is in it")
    add_list("contexts", "tokens; 4K is 4096")
    add_list("batch_sizes")
    add_list("acceptances", "of level 2, with a budget of 4,096 tokens")
    add("--draft-acceptance", type=float, default=0.5, help="of the draft's tokens, by level 2")
    add("--lookup-acceptance", type=float, default=0.3, help="of prompt lookup's, by level 2")
    add_list("lengths", "of proposals, in tokens, to choose from")
    add_list("gammas", "tokens of level 1 for a pass of level 2")
    add_list("budgets", "tokens that level 2 reads")
    add("--counts", type=Path, help="JSON file with counted launches (predict/counts.py)")
    add("--format", choices=("markdown", "json"), default="markdown")
    add("--output", type=Path, help="file, instead of the terminal")
    add("--offload", action="store_true", help="with KV in host memory: a page of Markdown")
    add(
        "--device-gib",
        type=float,
        default=MACHINES["RTX-4090"].memory_bytes / GIB,
        help="of --offload: of a device's memory, what is used; a card of 24 GB has as much",
    )
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
    lists = {name: getattr(args, name, of[args.offload]) for name, of in _DEFAULTS.items()}
    machines = [named_machine(name) for name in lists["machines"].split(",")]
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
    what: tuple = (
        machines,
        [_model(name, args.dtype) for name in lists["models"].split(",")],
        _numbers("--contexts", lists["contexts"]),
        _numbers("--batch-sizes", lists["batch_sizes"]),
        [
            Acceptance(share, args.draft_acceptance, args.lookup_acceptance)
            for share in shares("--acceptances", lists["acceptances"])
        ],
        settings(
            _numbers("--lengths", lists["lengths"]),
            _numbers("--gammas", lists["gammas"], least=0),
            _numbers("--budgets", lists["budgets"]),
        ),
        counts,
    )
    if args.offload:
        return _offload(args, what)
    found = cells(*what)
    return json.dumps(found, indent=1) if args.format == "json" else markdown(found)


def _offload(args: argparse.Namespace, what: tuple) -> str:
    from vllm_triforce_bench.predict.offload_cells import offload_cells, with_memory
    from vllm_triforce_bench.predict.offload_page import offload_page

    if args.device_gib <= 0:
        raise ValueError(f"--device-gib={args.device_gib:g} leaves nothing; give more than 0")
    if args.format == "json":
        machines = [with_memory(machine, args.device_gib) for machine in what[0]]
        return json.dumps(offload_cells(machines, *what[1:]), indent=1)
    command = f"vllm-triforce {shlex.join(args.argv)}"
    return offload_page(args.device_gib, command, *what)


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
