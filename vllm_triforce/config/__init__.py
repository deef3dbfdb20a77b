"""Configuration: TriForce's keys, and checks that run before any model loads."""

from vllm_triforce.config.resolved import ResolvedConfig
from vllm_triforce.config.triforce_config import TriForceConfig

__all__ = ["ResolvedConfig", "TriForceConfig"]
