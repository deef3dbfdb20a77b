"""Report of the kernels and operations that a run reached, printed at its end."""

import collections
import dataclasses


@dataclasses.dataclass
class Kernel:
    variants: set = dataclasses.field(default_factory=set)  # distinct binaries compiled for sm_90
    runs: int = 0  # launches run by the interpreter
    compile_errors: list[str] = dataclasses.field(default_factory=list)


class Report:
    def __init__(self):
        self.kernels: dict[str, Kernel] = {}
        self.ops: collections.Counter[str] = collections.Counter()

    def kernel(self, name: str) -> Kernel:
        return self.kernels.setdefault(name, Kernel())

    @property
    def failed(self) -> list[str]:
        return [name for name, kernel in self.kernels.items() if kernel.compile_errors]

    def __str__(self) -> str:
        lines = [
            "",
            "GPU emulation: Triton kernels (variants compiled for sm_90, launches interpreted)",
        ]
        lines += [
            f"{len(k.variants):6} {k.runs:6}  {name}" for name, k in sorted(self.kernels.items())
        ] or ["  none"]
        lines.append("GPU emulation: CUDA ops reached (calls of their CPU stand-ins)")
        lines += [f"{'':6} {n:6}  {name}" for name, n in sorted(self.ops.items())] or ["  none"]
        for name in self.failed:
            errors = self.kernels[name].compile_errors
            lines.append(
                f"GPU emulation: {name} DOES NOT COMPILE for sm_90 ({len(errors)} launches): "
                f"{errors[0]}"
            )
        return "\n".join(lines)


report = Report()
