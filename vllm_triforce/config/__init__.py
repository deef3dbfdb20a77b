"""Configuration: TriForce's keys, and checks that run before any model loads."""

from vllm_triforce.config.triforce_config import ResolvedConfig, TriForceConfig, read_config

__all__ = ["ResolvedConfig", "TriForceConfig", "read_config"]
