"""Runs a stream that was found, from the script that the fuzzer printed."""

import pprint

from tests.fuzz.judge import Fault, Judge, Running


def replay(settings: dict, stream: list[dict], seed: int = 0, times: int = 1) -> list[Fault]:
    """Drives a stream through a fresh engine and prints what is wrong with it.

    Args:
        settings: of the engine, as tests/fuzz/settings.py makes them.
        stream: requests, as tests/fuzz/streams.py makes them.
        times: how often, on the same engine; a chooser that goes by measured times may need more.
    """
    running, judge = Running(settings), Judge()
    faults: list[Fault] = []
    for number in range(times):
        if not any(fault.ends_engine for fault in faults):
            faults += judge.check(running, stream, seed + number)
    running.end()
    for fault in faults or ["nothing is wrong"]:
        print(fault)
    return faults


def script(settings: dict, stream: list[dict], seed: int, fault: Fault, runner: str) -> str:
    """A program that shows a fault."""
    run = "PYTHONPATH=. python SCRIPT"
    if runner == "v2":
        run = f"{V2_ENVIRONMENT} python SCRIPT"
    return (
        f'"""{fault.kind}; from the repository: {run}"""\n\n'
        "from tests.fuzz.replay import replay\n\n"
        f"settings = {pprint.pformat(settings, sort_dicts=False)}\n"
        f"stream = {pprint.pformat(stream, sort_dicts=False, width=100)}\n"
        f"replay(settings, stream, seed={seed}, times=3)\n"
    )


V2_ENVIRONMENT = (
    "PYTHONPATH=tests/v2/support:. TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 OMP_NUM_THREADS=1"
)
