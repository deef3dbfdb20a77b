"""What the suite does, most wanted first: about 40 minutes on one large GPU."""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from vllm_triforce_bench.gpu_suite.ladder import IMPORT, STOCK, TRIFORCE, need
from vllm_triforce_bench.gpu_suite.run import Step

ROOT = Path(__file__).parents[2]
BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32", "FLASHINFER": "bfloat16"}
# Triton multiplies float32 as TF32 unless told otherwise, which is coarser than the margin that
# float32 tokens are held to. It is part of the key of Triton's cache.
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
# Contexts and batches, most wanted first. 4,096 is what level 2 with a budget of 4,096 reads.
CELLS = {
    "llama-2-7b-128k": ["122000x1", "32000x1", "32000x4", "8000x1", "8000x8", "4096x1"],
    "llama-3.1-8b": ["100000x4", "122000x1", "32000x4", "32000x8", "8000x1", "8000x8", "4096x1"],
    "qwen3-8b": ["32000x4", "122000x1", "8000x1", "4096x1"],
}
FIRST_GEOMETRIES = ("llama-2-7b-128k", "llama-3.1-8b")
STOCK_BUDGET, BUDGETS = 0, (4096, 1024)
# Tokens of a part of a batch in training: about 1.2 MB of activations each.
MICRO_TOKENS = 32768
# A step fits into a call of ten minutes.
LONGEST_S = 540


@dataclass(frozen=True)
class Plan:
    """Makes the steps.

    Args:
        work: for models, and results between calls.
        tiny: a rehearsal that a CPU does in minutes.
        no_compile: every engine captures whole decode passes and compiles nothing.
    """

    device: str
    work: Path
    tiny: bool = False
    no_compile: bool = False

    def steps(self) -> list[Step]:
        """Of the device, in their order."""
        smoke = Step("smoke", self._module("smoke"), 300, least_s=60)
        if self.device == "cpu":
            found = [smoke, self._exactness("", "float32")]
            if self.tiny:
                cells = ["600x1", "600x2"]
                found += [self._benchmark("tiny", b, cells, "24") for b in (STOCK_BUDGET, 256)]
            return found + self._pair()
        exact = {backend: self._exactness(backend, dtype) for backend, dtype in BACKENDS.items()}
        found = [smoke, *self._kernels(), exact["FLASH_ATTN"]]
        for geometry in FIRST_GEOMETRIES:
            for budget in (STOCK_BUDGET, BUDGETS[0]):
                found.append(self._benchmark(geometry, budget, CELLS[geometry]))
        found += [self._exactness("FLASH_ATTN", "bfloat16", offload=True)]
        found += [self._offload(geometry) for geometry in FIRST_GEOMETRIES]
        found += [exact["TRITON_ATTN"], *self._pair(), exact["FLASHINFER"]]
        known = {step.name for step in found}
        rest = [
            self._benchmark(geometry, budget, cells)
            for budget in (STOCK_BUDGET, *BUDGETS)
            for geometry, cells in CELLS.items()
        ]
        return found + [step for step in rest if step.name not in known]

    def _module(self, name: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", f"{__package__}.{name}", *arguments]
        command += ["--device", self.device, "--work", str(self.work), "--result", "{result}"]
        return command + (["--no-compile"] if self.no_compile else [])

    def _needs(self, engine: str) -> tuple[str, ...]:
        return (need(self.device, self.no_compile, engine),)

    def _exactness(self, backend: str, dtype: str, offload: bool = False) -> Step:
        arguments = ["--dtype", dtype, *(["--backend", backend] if backend else [])]
        if self.tiny:
            arguments += ["--context", "400", "--num-tokens", "10", "--batches", "1", "2"]
            arguments += ["--num-samples", "12"]
        if offload:
            arguments += ["--offload"]
        return Step(
            f"exact-{backend.lower() or self.device}" + "-offload" * offload,
            self._module("exactness", *arguments),
            LONGEST_S,
            self._needs(TRIFORCE),
            least_s=90,
            environment=IEEE if dtype == "float32" else {},
        )

    def _kernels(self) -> list[Step]:
        """The kernels' own tests, where there are some."""
        folder = ROOT / "tests" / "kernels"
        if not folder.is_dir():
            return []
        command = self._module("kernel_tests", str(folder))
        return [Step("kernels", command, 240, (f"smoke:{IMPORT}",), least_s=60)]

    def _benchmark(self, geometry: str, budget: int, cells: list[str], num_steps="96") -> Step:
        arguments = ["--geometry", geometry, "--budget", str(budget)]
        arguments += ["--num-steps", num_steps, "--cells", *cells]
        return Step(
            f"bench-{geometry}-{budget or 'stock'}",
            self._module("benchmark", *arguments),
            420,
            self._needs(TRIFORCE if budget else STOCK),
            least_s=90,
        )

    def _offload(self, geometry: str) -> Step:
        """122K tokens with a card of 24 GB; the machine has to have host memory for them."""
        return Step(
            f"offload-{geometry}",
            self._module("offload", "--geometry", geometry),
            LONGEST_S,
            ("exact-flash_attn-offload", *self._needs(TRIFORCE)),
            least_s=240,
        )

    def _pair(self) -> list[Step]:
        """Trains a pair and measures it; the rehearsal takes the embedded one."""
        work = self.work / "pair"
        models = ROOT / "examples" / "models" if self.tiny else work / "models"
        cells = ["600x1", "400x2"] if self.tiny else ["8000x1", "32000x1", "8000x4", "32000x4"]
        measure = ["--models", str(models), "--cells", *cells]
        if self.tiny:
            measure += ["--budgets", "256", "--num-tokens", "24"]
            return [Step("pair", self._module("pair", *measure), LONGEST_S, self._needs(TRIFORCE))]
        train = [sys.executable, "-u", str(ROOT / "examples" / "train_pair")]
        train += ["--device", self.device, "--work", str(work), "--size", "medium"]
        train += ["--rows-factor", "16", "--micro-tokens", str(MICRO_TOKENS)]
        train += ["--more-text", sysconfig.get_paths()["purelib"], "--resume"]
        target, draft = work / "target.pt", work / "draft.pt"
        exported = models / "draft" / "model.safetensors"
        imported = (f"smoke:{IMPORT}",)
        return [
            # Paced by the clock, with a saved state: cut off, they go on in the next call.
            Step("train-target", [*train, "target", "--minutes", "5"], 480, imported, 120, target),
            Step(
                "train-draft",
                [*train, "draft", "--minutes", "1.5"],
                240,
                ("train-target",),
                60,
                draft,
            ),
            Step(
                "export",
                [*train, "export", "--out", str(models)],
                120,
                ("train-draft",),
                30,
                exported,
            ),
            Step(
                "pair",
                self._module("pair", *measure),
                300,
                ("export", *self._needs(TRIFORCE)),
                90,
            ),
        ]
