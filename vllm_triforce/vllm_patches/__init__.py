"""All changes to a running vLLM; patches/README.md is the ledger.

``PATCHES`` wrap methods and call the original unless the engine runs TriForce. The other modules
work around faults of vLLM, in engines that run TriForce only.
"""

from vllm_triforce.vllm_patches import carrier, cli_args, engine_args, stock_behavior  # noqa: F401
from vllm_triforce.vllm_patches.patch import PATCHES, install_in_engine, missing

__all__ = ["PATCHES", "install_in_engine", "missing"]
