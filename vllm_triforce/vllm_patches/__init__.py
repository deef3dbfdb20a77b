"""Everything that is changed in a running vLLM; patches/README.md is the ledger.

``PATCHES`` wrap methods and fall through unless TriForce is asked for. The other modules mend
faults of vLLM, in an engine that runs TriForce only.
"""

from vllm_triforce.config.supported import SUPPORTED_VLLM
from vllm_triforce.vllm_patches import (
    cli_args,
    counters,
    drafting_slots,
    drafts,
    engine_args,
    request_params,
    sessions,
)
from vllm_triforce.vllm_patches.patch import Patch

PATCHES: list[Patch] = [
    *cli_args.PATCHES,
    *engine_args.PATCHES,
    *request_params.PATCHES,
    *drafting_slots.PATCHES,
    *counters.PATCHES,
    *drafts.PATCHES,
    *sessions.PATCHES,
]


def missing(patches: list[Patch]) -> list[str]:
    """Name the patches of which this vLLM lacks what they wrap."""
    return [fault for patch in patches if (fault := patch.fault()) is not None]


def install_in_engine() -> None:
    """Wrap everything, where a process makes the configuration of an engine with TriForce.

    Raises:
        ValueError: this vLLM lacks what is wrapped, or has it with other parameters.
    """
    try:
        absent = missing(PATCHES)
    except ImportError as error:
        absent = [str(error)]
    if absent:
        raise ValueError(
            f"vllm-triforce wraps {', '.join(absent)}, which this vLLM does not have; install a "
            "vLLM that it knows, or drop method='triforce'"
        )
    for patch in PATCHES:
        if (misfit := patch.misfit()) is not None:
            raise ValueError(
                f"vllm-triforce wraps {misfit}; install vLLM {', '.join(SUPPORTED_VLLM)}"
            )
    for patch in PATCHES:
        patch.apply()
