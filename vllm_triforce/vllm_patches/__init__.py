"""All changes to a running vLLM; patches/README.md is the ledger.

``PATCHES`` wrap methods and call the original unless the engine runs TriForce. The other modules
work around faults of vLLM, in engines that run TriForce only.
"""

from vllm_triforce.config.supported import SUPPORTED_VLLM
from vllm_triforce.vllm_patches import (
    cli_args,
    counters,
    engine_args,
    stock_behavior,
)
from vllm_triforce.vllm_patches.patch import Patch

PATCHES: list[Patch] = [
    *cli_args.PATCHES,
    *engine_args.PATCHES,
    *stock_behavior.PATCHES,
    *counters.PATCHES,
]


def missing(patches: list[Patch]) -> list[str]:
    """Name the patches whose wrapped attribute this vLLM lacks."""
    return [name for patch in patches if (name := patch.missing_name()) is not None]


def install_in_engine() -> None:
    """Apply all patches in a process that configures an engine with TriForce.

    Raises:
        ValueError: this vLLM lacks a wrapped attribute, or its parameters differ.
    """
    try:
        missing_names = missing(PATCHES)
    except ImportError as error:
        missing_names = [str(error)]
    if missing_names:
        raise ValueError(
            f"vllm-triforce wraps {', '.join(missing_names)}, which this vLLM does not have. "
            f"Install vLLM {', '.join(SUPPORTED_VLLM)}, or drop method='triforce'."
        )
    for patch in PATCHES:
        if (mismatch := patch.signature_mismatch()) is not None:
            raise ValueError(
                f"vllm-triforce wraps {mismatch}. Install vLLM {', '.join(SUPPORTED_VLLM)}."
            )
    for patch in PATCHES:
        patch.apply()
