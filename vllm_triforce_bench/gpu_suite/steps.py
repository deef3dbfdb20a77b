"""What the suite does, most wanted first: about 25 minutes on one large GPU."""

import sys
import sysconfig
from pathlib import Path

from vllm_triforce_bench.gpu_suite.run import Step

ROOT = Path(__file__).parents[2]
BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32", "FLASHINFER": "bfloat16"}
# Contexts and batches, most wanted first. 4,096 is what level 2 with a budget of 4,096 reads.
CELLS = {
    "llama-2-7b-128k": ["122000x1", "32000x1", "32000x4", "8000x1", "8000x8", "4096x1"],
    "llama-3.1-8b": ["100000x4", "122000x1", "32000x4", "32000x8", "8000x1", "8000x8", "4096x1"],
    "qwen3-8b": ["32000x4", "122000x1", "8000x1", "4096x1"],
}
STOCK, BUDGETS = 0, (4096, 1024)


def steps(device: str, work: Path, tiny: bool = False) -> list[Step]:
    """The steps for a device; ``tiny`` is a rehearsal that a CPU does in minutes."""
    found = [
        Step(
            "smoke",
            _module("smoke", "--device", device),
            120,
            least_s=20,
        )
    ]
    found += _exactness(device, tiny) + _kernels(device)
    if tiny:
        cells = ["600x1", "600x2"]
        found += [_benchmark(device, work, "tiny", b, cells, "24") for b in (STOCK, 256)]
        return found + _pair(device, work, tiny)
    for geometry in ("llama-2-7b-128k", "llama-3.1-8b"):
        found += [_benchmark(device, work, geometry, b, CELLS[geometry]) for b in (STOCK, 4096)]
    found += _pair(device, work, tiny)
    known = {step.name for step in found}
    rest = [
        _benchmark(device, work, geometry, budget, cells)
        for budget in (STOCK, *BUDGETS)
        for geometry, cells in CELLS.items()
    ]
    return found + [step for step in rest if step.name not in known]


def _module(name: str, *arguments: str) -> list[str]:
    module = f"{__package__}.{name}"
    return [sys.executable, "-m", module, *arguments, "--result", "{result}"]


def _exactness(device: str, tiny: bool) -> list[Step]:
    if device == "cpu":
        small = ("--context", "400", "--num-tokens", "10", "--batches", "2", "--num-samples", "12")
        arguments = ("--device", "cpu", "--dtype", "float32", *(small if tiny else ()))
        return [
            Step(
                "exact-cpu",
                _module("exactness", *arguments),
                600,
                ("smoke",),
            )
        ]
    return [
        Step(
            f"exact-{backend.lower()}",
            _module(
                "exactness",
                "--device",
                device,
                "--backend",
                backend,
                "--dtype",
                dtype,
            ),
            300,
            ("smoke",),
            least_s=120,
        )
        for backend, dtype in BACKENDS.items()
    ]


def _kernels(device: str) -> list[Step]:
    """The kernels' own tests, where there are some, on this device rather than interpreted."""
    if device == "cpu" or not (ROOT / "tests" / "kernels").is_dir():
        return []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return [Step("kernels", [*command, str(ROOT / "tests" / "kernels")], 240, ("smoke",))]


def _benchmark(device, work, geometry, budget, cells, num_tokens="96") -> Step:
    arguments = ["--geometry", geometry, "--budget", str(budget), "--device", device]
    arguments += ["--work", str(work), "--num-tokens", num_tokens, "--cells", *cells]
    name = f"bench-{geometry}-{budget or 'stock'}"
    return Step(name, _module("benchmark", *arguments), 420, ("smoke",), 90)


def _pair(device: str, work: Path, tiny: bool) -> list[Step]:
    """Trains a pair and measures it; the rehearsal takes the embedded one."""
    models = ROOT / "examples" / "models" if tiny else work / "pair" / "models"
    cells = ["600x1", "400x2"] if tiny else ["8000x1", "32000x1", "8000x4", "32000x4"]
    measure = ["--models", str(models), "--device", device, "--cells", *cells]
    if tiny:
        measure += ["--budgets", "256", "--num-tokens", "24"]
        return [Step("pair", _module("pair", *measure), 600, ("smoke",))]
    train = [sys.executable, "-u", str(ROOT / "examples" / "train_pair.py"), "--device", device]
    train += ["--work", str(work / "pair"), "--size", "medium", "--rows-factor", "16"]
    train += ["--more-text", sysconfig.get_paths()["purelib"], "--resume"]
    target, draft = work / "pair" / "target.pt", work / "pair" / "draft.pt"
    exported = models / "draft" / "model.safetensors"
    export = [*train, "export", "--out", str(models)]
    return [
        # Paced by the clock, with a saved state: cut off, they go on in the next call.
        Step("train-target", [*train, "target", "--minutes", "5"], 480, ("smoke",), 120, target),
        Step(
            "train-draft", [*train, "draft", "--minutes", "1.5"], 240, ("train-target",), 60, draft
        ),
        Step("export", export, 120, ("train-draft",), 30, exported),
        Step("pair", _module("pair", *measure), 300, ("export",), 90),
    ]
