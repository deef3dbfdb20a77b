"""What a user may ask for, checked before any model is loaded."""

from vllm_triforce.config.triforce_config import TriForceConfig

__all__ = ["TriForceConfig"]
