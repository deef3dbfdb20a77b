"""The GPU suite with quick fakes for steps, to be killed anywhere (``test_gpu_suite_kills.py``).

    python fake_suite.py --work FOLDER --out FOLDER      # the suite's own arguments
    python fake_suite.py step NAME WORK RESULT           # one of its steps

What happens is written to ``WORK/journal``, a line each: "begin STEP ITEM" before an item's work,
"kept STEP ITEM" when its result is on disk, "repeated ..." where something is done again that was.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm_triforce_bench.gpu_suite import suite
from vllm_triforce_bench.gpu_suite.items import Items
from vllm_triforce_bench.gpu_suite.run import Step, run_steps
from vllm_triforce_bench.gpu_suite.state import read_json

ITEMS = {
    "smoke": ["import", "eager", "compiled"],
    "exact": ["one", "two", "three", "four"],
    "bench": ["8000x1", "32000x1", "32000x4"],
    "pair": ["stock", "ours"],
}
TRAINING_PARTS = 5
ITEM_S = 0.04


class FakePlan:
    """In the place of ``steps.Plan``."""

    def __init__(self, device: str, work: Path, tiny: bool, no_compile: bool) -> None:
        self.work = work

    def steps(self) -> list[Step]:
        return [
            self._step("smoke"),
            self._step("exact", needs=("smoke:eager",)),
            self._step("single"),
            self._step("bench", needs=("smoke:compiled",)),
            self._step("train", needs=("smoke:import",), leaves=self.work / "model"),
            self._step("pair", needs=("train",)),
        ]

    def _step(self, name: str, **more) -> Step:
        command = [sys.executable, __file__, "step", name, str(self.work), "{result}"]
        return Step(name, command, 20, least_s=0, **more)


def step(name: str, work: Path, result: Path) -> None:
    def journal(what: str) -> None:
        with (work / "journal").open("a") as file:
            file.write(f"{what}\n")

    if json.loads((work / "state.json").read_text())["steps"][name]["status"] == "done":
        journal(f"repeated {name}")

    def do(item: str) -> dict:
        if item in (read_json(result) or {}).get("items", {}):
            journal(f"repeated {name} {item}")
        journal(f"begin {name} {item}")
        time.sleep(ITEM_S)
        return {"found": f"{name} {item}"}

    if name in ITEMS:
        items = Items(result)
        for item in ITEMS[name]:
            items.run_all([item], lambda: None, lambda engine, item: do(item))
            if "error" not in items.found[item]:
                journal(f"kept {name} {item}")
        raise SystemExit(int(items.num_errors > 0))
    if name == "train":  # as a training with checkpoints
        model = work / "model"
        for part in range(int(model.read_text()) if model.exists() else 0, TRAINING_PARTS):
            do(f"part {part}")
            fresh = work / "model.new"
            fresh.write_text(str(part + 1))
            os.replace(fresh, model)
            journal(f"kept {name} part {part}")
        return
    result.write_text(json.dumps(do("all of it")))
    journal(f"kept {name} all of it")


if __name__ == "__main__":
    if sys.argv[1] == "step":
        step(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        suite.Plan = FakePlan  # type: ignore[misc,assignment]
        suite.prepare = lambda work, kit: {}  # type: ignore[assignment]
        suite.run_steps = functools.partial(run_steps, poll_s=0.02)  # type: ignore[assignment]
        sys.exit(suite.main())
