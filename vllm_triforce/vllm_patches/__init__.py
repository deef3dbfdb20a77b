"""Everything that is changed in a running vLLM; patches/README.md is the ledger.

``PATCHES`` wrap methods and fall through unless TriForce is asked for. The other modules mend
faults of vLLM, in an engine that runs TriForce only.
"""

from vllm_triforce.config.supported import SUPPORTED_VLLM
from vllm_triforce.vllm_patches import (
    counters,
    drafting_slots,
    drafts,
    engine_args,
    request_params,
    sessions,
)
from vllm_triforce.vllm_patches.patch import Patch

PATCHES: list[Patch] = [
    *engine_args.PATCHES,
    *request_params.PATCHES,
    *drafting_slots.PATCHES,
    *counters.PATCHES,
    *drafts.PATCHES,
    *sessions.PATCHES,
]


def missing(engine_process: bool) -> list[str]:
    """What ``install()`` would wrap and this vLLM does not have."""
    return [fault for patch in PATCHES if (fault := patch.fault(engine_process)) is not None]


def install(engine_process: bool) -> None:
    """Wraps each once.

    Args:
        engine_process: False where it is not known that an engine will run here: what vLLM has
            not loaded is then left alone.
    """
    for patch in PATCHES:
        patch.apply(engine_process)


def check_signatures(engine_process: bool = False) -> None:
    """Refuses a vLLM in which what we wrap takes other parameters.

    Raises:
        ValueError: names it, with both.
    """
    for patch in PATCHES:
        if (misfit := patch.misfit(engine_process)) is not None:
            raise ValueError(
                f"vllm-triforce wraps {misfit}; install vLLM {', '.join(SUPPORTED_VLLM)}"
            )


def install_in_engine() -> None:
    """Where a process makes the configuration of an engine with TriForce.

    Raises:
        ValueError: this vLLM lacks what is wrapped, or has it with other parameters.
    """
    if absent := missing(engine_process=True):
        raise ValueError(
            f"vllm-triforce wraps {', '.join(absent)}, which this vLLM does not have; install a "
            "vLLM that it knows, or drop method='triforce'"
        )
    check_signatures(engine_process=True)
    install(engine_process=True)
